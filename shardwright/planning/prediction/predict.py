"""What a plan will take: the time of a step, and for each slot its work, its waiting, its memory.

Comes in: a graph, any `Plan` for it, the machines and what nodes cost. Goes out: a `Prediction`. It
is what the automatic planner minimises: sums over stages, a schedule laid out in time (`timing`),
and bytes (`memory`). `sw.simulate` walks a built file task by task, and is what this is held
against.

What always holds: equal plans have equal predictions, and the planner's own numbers are these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from shardwright.clusters import Cluster, DeviceModel
from shardwright.costs.cost import Analytic, Costs
from shardwright.ir import IRGraph
from shardwright.planning.options import StepOptions, check_graph
from shardwright.planning.plan import Plan, cluster_of
from shardwright.planning.predicted import Prediction, SlotMemory, SlotPrediction
from shardwright.planning.prediction.exchange import Exchange, RankLinks
from shardwright.planning.prediction.memory import rank_memory
from shardwright.planning.prediction.source import Integers
from shardwright.planning.prediction.sources import Sources
from shardwright.planning.prediction.spread import Spread
from shardwright.planning.prediction.spreading import SpreadPlan, spread_of_plan
from shardwright.planning.prediction.sums import Sums, added, sums_of
from shardwright.planning.prediction.timing import (
    Laid,
    Order,
    Passing,
    StageTimes,
    lay_out,
    order_of,
)
from shardwright.planning.prediction.update import rank_updates
from shardwright.planning.rules import DATA


def predict(
    graph: IRGraph,
    plan: Plan,
    cluster: Cluster | None = None,
    costs: Costs | None = None,
    sources: Sources | None = None,
) -> Prediction:
    """What a plan for a graph will take.

    Without a ``cluster`` it is for the plan's own; without ``costs`` they follow from
    shapes and the cluster's device; ``sources`` has the forms of the graph that are known. Raises
    PlanError where the plan is for another graph or names slots that the cluster lacks.
    """
    check_graph(graph)
    cluster = cluster or cluster_of(plan)
    found = spread_of_plan(graph, plan, cluster, costs or Analytic(cluster.device), sources)
    return estimate_plan(found, cluster).prediction()


def estimate_plan(found: SpreadPlan, cluster: Cluster) -> Estimate:
    """What a plan takes that is spread over the meshes of its stages."""
    staged = found.staged
    return estimate(
        found.spread,
        staged.stages,
        staged.options,
        cluster,
        staged.slots,
        placement=staged.placement,
        shards=found.shards,
    )


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a partition of a spread forward takes, by pipeline rank."""

    step_time: float
    latency: float
    microbatches: int
    slots: Sequence[Sequence[str]]
    busy: Sequence[float]
    memory: Sequence[SlotMemory]

    def prediction(self) -> Prediction:
        """The same for each slot."""
        return Prediction(
            self.step_time,
            self.latency,
            self.microbatches,
            tuple(
                SlotPrediction(device, busy, max(self.step_time - busy, 0.0), memory)
                for devices, busy, memory in zip(self.slots, self.busy, self.memory, strict=True)
                for device in devices
            ),
        )


def estimate(
    spread: Spread,
    stages: Sequence[int] | Integers,
    options: StepOptions,
    cluster: Cluster,
    slots: Sequence[Sequence[str]],
    *,
    memory: float = math.inf,
    placement: Sequence[int] | None = None,
    shards: Sequence[int] | None = None,
) -> Estimate:
    """What a forward takes whose nodes are in these virtual stages; ``slots`` of each rank.

    ``placement`` is the rank of each stage of a model, where a rank has several; a training step's
    is its schedule's. ``shards`` is how many slots of each rank share the batch, where ranks differ
    in it. Where a slot of a training step holds more than ``memory`` bytes, its time is not worked
    out: it is infinite.
    """
    if not spread.source.training:
        links = RankLinks.of(cluster, slots)
        return _of_model(spread, stages, placement or range(len(slots)), links, slots)
    order = order_of(options.schedule, len(slots), options.microbatches, options.chunks)
    sums = sums_of(spread, stages, order.schedule.stages)
    dealt = shards or [spread.axes.get(DATA, 1)]
    held, again = _memory(sums, order, options, dealt, lends=lends(cluster))
    if max(found.total for found in held) > memory:
        count = options.microbatches
        return Estimate(math.inf, math.inf, count, slots, [math.inf] * len(held), held)
    times = StageTimes(
        sums.forward.tolist(), (sums.backward + np.array(again)).tolist(), sums.weight.tolist()
    )
    placement = order.schedule.placement
    exchange = Exchange.of(RankLinks.of(cluster, slots), placement, sums)
    laid = lay_out(
        order, exchange.with_workers(times), exchange.traffic(), early=sends_early(options)
    )
    dealt_out = _dealt_out(len(slots), options, dealt)
    ends = once_a_step(sums, placement, dealt_out, cluster.device)
    return _of_step(laid, ends, held, slots, options)


def lends(cluster: Cluster) -> bool:
    """Whether messages stand in memory that slots share."""
    return cluster.device.kind == "cpu"


def _memory(
    sums: Sums, order: Order, options: StepOptions, shards: Sequence[int], *, lends: bool
) -> tuple[list[SlotMemory], list[float]]:
    """What `rank_memory` says, where ranks may deal out states among other numbers of slots."""
    if len(set(shards)) == 1:
        return rank_memory(sums, order, options, shards[0], lends=lends)
    held, again = rank_memory(sums, order, options, 1, lends=lends)
    parts = shards if options.zero else [1] * len(held)
    return [
        msgspec.structs.replace(
            one, optimizer=round(one.optimizer / count), updated=round(one.updated / count)
        )
        for one, count in zip(held, parts, strict=True)
    ], again


def _dealt_out(ranks: int, options: StepOptions, shards: Sequence[int]) -> Sequence[int]:
    """Over how many slots of each rank states are dealt out."""
    if not options.zero:
        return [1] * ranks
    return shards if len(shards) == ranks else [shards[0]] * ranks


def sends_early(options: StepOptions) -> bool:
    """Whether gradients are sent before those of weights are made, as `building` has it."""
    return options.recompute == "none"


def _of_step(
    laid: Laid,
    ends: Sequence[float],
    memory: Sequence[SlotMemory],
    slots: Sequence[Sequence[str]],
    options: StepOptions,
) -> Estimate:
    step = max(done + end for done, end in zip(laid.done, ends, strict=True))
    busy = [work + end for work, end in zip(laid.busy, ends, strict=True)]
    return Estimate(step, step, options.microbatches, slots, busy, memory)


def _of_model(
    spread: Spread,
    stages: Sequence[int] | Integers,
    placement: Sequence[int],
    links: RankLinks,
    slots: Sequence[Sequence[str]],
) -> Estimate:
    """A model's calls follow one another; the slowest rank or line decides how fast."""
    ranks = np.asarray(placement, dtype=np.int64)[np.asarray(stages, dtype=np.int64)]
    sums = sums_of(spread, ranks, len(slots))
    options = StepOptions(schedule="gpipe")
    order = order_of(options.schedule, len(slots), 1, 1)
    busy, passing = _of_call(Exchange.of(links, range(len(slots)), sums), sums)
    memory, _ = rank_memory(sums, order, options, 1)
    step = max([*busy, *(passes.line for passes in passing.values())])
    latency = _latency(sums_of(spread, stages, len(placement)), placement, links)
    return Estimate(step, latency, 1, slots, busy, memory)


def _latency(sums: Sums, placement: Sequence[int], links: RankLinks) -> float:
    """Seconds of one call of a model: stages in order, each when its rank and what it reads are."""
    busy, passing = _of_call(Exchange.of(links, placement, sums), sums)
    free: dict[int, float] = {}
    done: list[float] = []
    for stage, seconds in enumerate(busy):
        rank = placement[stage]
        arrivals = (
            done[giver] + (passes.line if placement[giver] != rank else 0.0)
            for (giver, taker), passes in passing.items()
            if taker == stage
        )
        free[rank] = max([free.get(rank, 0.0), *arrivals]) + seconds
        done.append(free[rank])
    return max(done)


def _of_call(
    exchange: Exchange, sums: Sums
) -> tuple[Sequence[float], Mapping[tuple[int, int], Passing]]:
    """Seconds of each stage in a call of a model, and what passes."""
    return exchange.of_calls((sums.forward + sums.once).tolist()), exchange.traffic().forward


def once_a_step(
    sums: Sums, placement: Sequence[int], shards: Sequence[int], device: DeviceModel
) -> list[float]:
    """Seconds of each rank behind its last backward: gradients put together, and the update.

    ``shards`` is over how many slots of each rank states are dealt out.
    """
    ranks = np.asarray(placement, dtype=np.int64)
    once = added(ranks, sums.once, len(shards))
    found = once + rank_updates(sums.spread, ranks[sums.stages], shards, device)
    return [float(seconds) for seconds in found]
