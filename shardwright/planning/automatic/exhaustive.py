"""Every partition of a small forward in stages, all laid out in time at once.

Comes in: a `Spread` of few nodes, a schedule, and how long a step may take. Goes out: partitions
that take less, the fastest first. The stages need not be ranges of nodes: what counts is that no
node reads what a later stage makes. What always holds: no partition is left out that takes less,
unless there are more than `MOST`; and each takes what `estimate` says of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwright.layout import Cluster
from shardwright.planning.prediction.exchange import Exchange, RankLinks
from shardwright.planning.prediction.source import Floats, Forward, Integers
from shardwright.planning.prediction.spread import Spread
from shardwright.planning.prediction.timing import Order, StageTimes, lay_out
from shardwright.planning.prediction.update import update_seconds
from shardwright.planning.worker_time import worker_seconds

FEW_NODES = 12
MOST = 200_000
Rows = NDArray[np.int64]
"""A partition a row: the stage of each node."""


def is_small(source: Forward) -> bool:
    """Whether a forward has so few nodes that all partitions can be tried."""
    return len(source.view.nodes) - len(source.prepare) <= FEW_NODES


def fastest_partitions(
    spread: Spread,
    order: Order,
    cluster: Cluster,
    slots: Sequence[Sequence[str]],
    *,
    below: float,
    zero: int = 0,
) -> list[Integers]:
    """Partitions of which a step takes less than ``below`` seconds, the fastest first."""
    schedule = order.schedule
    rows = _every(spread, schedule.stages, below / schedule.microbatches)
    if rows is None or not len(rows):
        return []
    ends = _ends(spread, rows, order, cluster, zero)
    exchange = _exchange(spread, rows, order, RankLinks.of(cluster, slots))
    if not spread.source.training:
        times = _of_calls(spread, rows, exchange)
    else:
        worked = exchange.with_workers(_times(spread, rows, schedule.stages))
        laid = lay_out(order, worked, exchange.traffic())
        times = np.max([done + end for done, end in zip(laid.done, ends, strict=True)], axis=0)
    found = np.argsort(times, kind="stable")
    return [rows[i] for i in found[: np.searchsorted(times[found], below)].tolist()]


# --- all partitions -------------------------------------------------------------------------------


def _every(spread: Spread, stages: int, most: float) -> Rows | None:
    """All partitions in which no stage takes longer than ``most``; None where they are too many.

    Node by node, each is put in every stage from the last of those that it reads on.
    """
    source = spread.source
    seconds = spread.seconds
    rows = np.zeros((1, 0), dtype=np.int64)
    loads = np.zeros((1, stages))
    for i in range(len(source.view.nodes)):
        if i in source.prepare:
            rows = np.hstack([rows, np.zeros((len(rows), 1), dtype=np.int64)])
            continue
        first = _first_stages(source, i, rows)
        counts = stages - first
        if counts.sum() > MOST:
            return None
        which = np.repeat(np.arange(len(rows)), counts)
        begins = np.repeat(np.cumsum(counts) - counts, counts)
        stage = first[which] + np.arange(len(which)) - begins
        loads = loads[which]
        loads[np.arange(len(which)), stage] += seconds[i]
        within = loads[np.arange(len(which)), stage] <= most * (1 + 1e-9)
        rows = np.hstack([rows[which], stage[:, None]])[within]
        loads = loads[within]
    made = [i for i in range(len(source.view.nodes)) if i not in source.prepare]
    full = np.all([(rows[:, made] == stage).any(axis=1) for stage in range(stages)], axis=0)
    return _with_prepare(source, rows[full])


def _first_stages(source: Forward, position: int, rows: Rows) -> Integers:
    """The last of the stages that a node reads from, in each partition."""
    first = np.zeros(len(rows), dtype=np.int64)
    for value_id in source.view.nodes[position].inputs:
        producer = source.view.values[value_id].producer
        if producer is not None and source.position[producer] not in source.prepare:
            first = np.maximum(first, rows[:, source.position[producer]])
    return first


def _with_prepare(source: Forward, rows: Rows) -> Rows:
    """What is done once a step in the first stage that reads it."""
    for i in sorted(source.prepare, reverse=True):
        users = {u for v in source.view.nodes[i].outputs for u in source.view.values[v].users}
        if users:
            rows[:, i] = rows[:, [source.position[user] for user in users]].min(axis=1)
    return rows


# --- what they take -------------------------------------------------------------------------------


def _by_stage(numbers: Floats, rows: Rows, stages: int) -> list[Floats]:
    """The sum of each stage's nodes, in each partition."""
    return [((rows == stage) * numbers).sum(axis=1) for stage in range(stages)]


def _times(spread: Spread, rows: Rows, stages: int) -> StageTimes:
    columns = (spread.forward, spread.backward, spread.weight)
    return StageTimes(*(_by_stage(numbers, rows, stages) for numbers in columns))


def _ends(spread: Spread, rows: Rows, order: Order, cluster: Cluster, zero: int) -> list[Floats]:
    """Seconds of each rank once a step, in each partition."""
    schedule = order.schedule
    shards = spread.axes.get("data", 1) if zero else 1
    ranks = np.array(schedule.placement)[rows]
    beside = worker_seconds(cluster.device)
    found = _by_stage(spread.once + beside * spread.gathered, ranks, schedule.ranks)
    stored, seconds = spread.stored, update_seconds(spread.gradient, shards, cluster.device)
    trains = np.zeros((schedule.ranks, len(rows)), dtype=bool)
    for number in np.unique(stored.number):
        at = np.flatnonzero(stored.number == number)
        for rank in range(schedule.ranks):
            reads = (ranks[:, stored.node[at]] == rank).any(axis=1)
            found[rank] = found[rank] + seconds[at[0]] * reads
            trains[rank] |= reads & (spread.gradient[at[0]] > 0)
    return [taken + beside * own for taken, own in zip(found, trains, strict=True)]


def _exchange(spread: Spread, rows: Rows, order: Order, links: RankLinks) -> Exchange:
    """What stages send one another, in each partition."""
    placement, stages = order.schedule.placement, order.schedule.stages
    every = np.ones(len(spread.made), dtype=bool)
    answers = _messages(spread, rows, stages, spread.answered)
    back = {(taker, giver): passed for (giver, taker), passed in answers.items()}
    there = _messages(spread, rows, stages, every)
    brought = np.bincount(spread.fetched.node, minlength=rows.shape[1]).astype(np.float64)
    return Exchange(
        links,
        placement,
        there,
        back,
        _blocks(spread, rows, stages),
        _by_stage(brought, rows, stages),
    )


def _blocks(spread: Spread, rows: Rows, stages: int) -> list[Floats]:
    """How many blocks each stage has, in each partition."""
    each = [i for i in range(rows.shape[1]) if i not in spread.source.prepare]
    blocks = spread.block[each]
    return [
        np.sum(
            [
                (rows[:, each] == stage)[:, blocks == block].any(axis=1)
                for block in np.unique(blocks)
            ],
            axis=0,
        )
        for stage in range(stages)
    ]


def _messages(
    spread: Spread, rows: Rows, stages: int, counted: NDArray[np.bool_]
) -> dict[tuple[int, int], tuple[Floats, Floats]]:
    """By pair of stages: how many values pass, and their bytes, in each partition."""
    passed = spread.passed
    found: dict[tuple[int, int], tuple[Any, Any]] = {}
    for number in np.unique(passed.number[counted]):
        at = np.flatnonzero((passed.number == number) & counted)
        giver = rows[:, spread.made[at[0]]]
        takers = rows[:, passed.node[at]]
        for taker in range(1, stages):
            reads = (takers == taker).any(axis=1)
            for stage in range(taker):
                passes = reads & (giver == stage)
                values, nbytes = found.get((stage, taker), (0, 0.0))
                found[stage, taker] = values + passes, nbytes + passes * passed.size[at[0]]
    return found


def _of_calls(spread: Spread, rows: Rows, exchange: Exchange) -> Floats:
    """Seconds between a model's results: of the slowest rank or line."""
    placement = exchange.placement
    stages = len(placement)
    assert sorted(placement) == [*range(stages)], "a model's ranks have a stage each"
    seconds = _by_stage(spread.forward + spread.once, rows, stages)
    busy = exchange.of_calls(seconds)
    lines = [passes.line for passes in exchange.traffic().forward.values()]
    return np.asarray(np.max([*busy, *lines], axis=0))
