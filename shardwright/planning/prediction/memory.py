"""What a slot holds at most, item by item.

Comes in: the sums of a partition's stages, and the order of its schedule. Goes out: a `SlotMemory`
for each pipeline rank, and how many seconds of work are done again where activations do not fit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardwright.planning.predicted import SlotMemory
from shardwright.planning.prediction.source import Floats, Integers, Pairs
from shardwright.planning.prediction.sums import Sums, added, distinct
from shardwright.planning.prediction.timing import Order
from shardwright.planning.training import Options
from shardwright.schedule.held import Held, waits_inside

__all__ = ["SlotMemory", "rank_memory"]


def rank_memory(
    sums: Sums, order: Order, options: Options, shards: int
) -> tuple[list[SlotMemory], list[float]]:
    """What a slot of each rank holds, and each stage's seconds of work that is done again."""
    schedule = order.schedule
    ranks = np.array(schedule.placement, dtype=np.int64)[sums.stages]
    held = _held(sums, ranks, schedule.ranks, shards if options.zero else 1)
    again = [0.0] * sums.count
    found = []
    for rank, (parameters, gradients, optimizer, updated) in enumerate(held):
        stages = schedule.stages_of(rank)
        kept = _Kept(sums, stages, _held_at_once(sums, stages, order, rank), options)
        for stage, seconds in zip(stages, kept.again, strict=True):
            again[stage] = seconds
        found.append(
            SlotMemory(
                parameters,
                gradients,
                optimizer,
                round(kept.peak),
                round(max(sums.working[s] + kept.redone * sums.block[s] for s in stages)),
                round(sum(sums.received[s] + sums.sizes[s] for s in stages)),
                updated,
            )
        )
    return found, again


def _held(sums: Sums, ranks: Integers, count: int, shards: int) -> list[tuple[int, int, int, int]]:
    """Bytes of stored values, gradients, states and what is updated, by rank."""
    spread = sums.spread
    found = []
    for size in (spread.stored.size, spread.gradient, spread.state):
        pairs = distinct(spread.stored._replace(size=size), ranks)
        found.append(added(pairs.node, pairs.size, count))
    stored, gradient, state = found
    return [
        (round(a), round(b), round(c / shards), round(b / shards))
        for a, b, c in zip(stored.tolist(), gradient.tolist(), state.tolist(), strict=True)
    ]


class _Kept:
    """What a rank keeps of its forwards, and how long it takes to do the rest again."""

    def __init__(
        self,
        sums: Sums,
        stages: Sequence[int],
        held: Held,
        options: Options,
    ) -> None:
        numbers = list(stages)
        saved, crossing = sums.saved, sums.crossing
        if options.recompute == "auto":
            alone, also = _twice(sums, numbers)
            saved, crossing = saved + alone, crossing + also
        most, least = held.most(saved[numbers]), held.most(np.minimum(crossing, saved)[numbers])
        share = _share(options, most, least)
        self.peak = most - share * (most - least)
        self.redone = float(share > 0)
        self.again = [share * float(sums.again[stage]) for stage in stages]
        """Seconds, by stage."""


def _held_at_once(sums: Sums, stages: Sequence[int], order: Order, rank: int) -> Held:
    """What a rank holds, in microbatches."""
    numbers = list(stages)
    waits = waits_inside(sums.fetched[numbers].sum(), sums.saved[numbers].sum())
    return Held(order.held[rank], order.ahead[rank] if waits else None)


def _twice(sums: Sums, stages: Sequence[int]) -> tuple[Floats, Floats]:
    """Bytes that a budget counts for their maker too: other stages of its rank reread them.

    First without what the maker's own backward reads, then with it.
    """
    saved, spread = sums.spread.saved, sums.spread
    maker = np.full(1 + max(saved.number.max(initial=0), spread.passed.number.max(initial=0)), -1)
    maker[spread.passed.number] = spread.made
    made = maker[saved.number]
    giver, taker = sums.stages[made], sums.stages[saved.node]
    lent = (made >= 0) & (giver != taker) & np.isin(giver, stages) & np.isin(taker, stages)
    own = np.isin(_pairs(giver, saved.number), _pairs(taker, saved.number))
    rows = saved._replace(node=made)

    def by_giver(which: NDArray[np.bool_]) -> Floats:
        pairs = Pairs(rows.number[which], rows.node[which], rows.size[which])
        found = distinct(pairs, sums.stages)
        return added(found.node, found.size, sums.count)

    return by_giver(lent & ~own), by_giver(lent)


def _pairs(stages: Integers, numbers: Integers) -> Integers:
    """A number for each pair of a stage and a value."""
    return stages * (int(numbers.max(initial=0)) + 1) + numbers


def _share(options: Options, most: float, least: float) -> float:
    """How much of what may be computed again is."""
    if options.recompute == "none" or most <= least:
        return 0.0
    if options.recompute == "full":
        return 1.0
    assert options.memory is not None
    return min(max((most - options.memory) / (most - least), 0.0), 1.0)
