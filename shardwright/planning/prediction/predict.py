"""What a plan will take: the time of a step, and for each slot its work, its waiting, its memory.

Comes in: a graph, any `Plan` for it, the machines and what nodes cost. Goes out: a `Prediction`. It
is what the automatic planner minimises: sums over stages, a schedule laid out in time (`timing`),
and bytes (`memory`). `sw.simulate` walks a built file task by task, and is what this is held
against.

What always holds: equal plans have equal predictions, and the planner's own numbers are these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.errors import PlanError
from shardwright.ir import IRGraph
from shardwright.layout import Cluster
from shardwright.planning.mesh import DATA
from shardwright.planning.plan import Plan
from shardwright.planning.predicted import Prediction, SlotMemory, SlotPrediction
from shardwright.planning.prediction.memory import rank_memory
from shardwright.planning.prediction.spread import Integers, Spread
from shardwright.planning.prediction.spreading import spread_of_plan
from shardwright.planning.prediction.sums import Sums, sums_of
from shardwright.planning.prediction.timing import (
    Laid,
    Passing,
    StageTimes,
    Traffic,
    lay_out,
    order_of,
)
from shardwright.planning.training import Options
from shardwright.profiling.cost import Analytic, Costs
from shardwright.profiling.operations import UPDATE_PASSES


def predict(
    graph: IRGraph, plan: Plan, cluster: Cluster | None = None, costs: Costs | None = None
) -> Prediction:
    """What a plan for a graph will take.

    Without a ``cluster`` all slots are processes of one host; without ``costs`` they follow from
    shapes and the cluster's device. Raises PlanError where the plan is for another graph or names
    slots that the cluster lacks.
    """
    cluster = cluster or Cluster((plan.devices,))
    found = spread_of_plan(graph, plan, cluster, costs or Analytic(cluster.device))
    return estimate(found.spread, found.stages, found.options, cluster, found.slots).prediction()


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
    options: Options,
    cluster: Cluster,
    slots: Sequence[Sequence[str]],
    *,
    memory: float = math.inf,
) -> Estimate:
    """What a forward takes whose nodes are in these virtual stages; ``slots`` of each rank.

    Where a slot of a training step holds more than ``memory`` bytes, its time is not worked out:
    it is infinite.
    """
    order = order_of(options.schedule, len(slots), options.microbatches, options.chunks)
    sums = sums_of(spread, stages, order.schedule.stages)
    links = RankLinks.of(cluster, slots)
    if not spread.source.training:
        return _of_model(sums, links, slots, options, order.schedule.placement)
    held, again = rank_memory(sums, order, options, spread.axes.get(DATA, 1))
    if max(found.total for found in held) > memory:
        count = options.microbatches
        return Estimate(math.inf, math.inf, count, slots, [math.inf] * len(held), held)
    times = StageTimes(
        sums.forward.tolist(), (sums.backward + np.array(again)).tolist(), sums.weight.tolist()
    )
    laid = lay_out(
        order,
        times,
        traffic_of(sums, order.schedule.placement, links),
        early=sends_early(options),
    )
    ends = once_a_step(sums, order.schedule.placement, held, cluster)
    return _of_step(laid, ends, held, slots, options)


def sends_early(options: Options) -> bool:
    """Whether gradients are sent before those of weights are made, as `transform` has it."""
    return options.recompute == "none"


def _of_step(
    laid: Laid,
    ends: Sequence[float],
    memory: Sequence[SlotMemory],
    slots: Sequence[Sequence[str]],
    options: Options,
) -> Estimate:
    step = max(done + end for done, end in zip(laid.done, ends, strict=True))
    busy = [work + end for work, end in zip(laid.busy, ends, strict=True)]
    return Estimate(step, step, options.microbatches, slots, busy, memory)


def _of_model(
    sums: Sums,
    links: RankLinks,
    slots: Sequence[Sequence[str]],
    options: Options,
    placement: Sequence[int],
) -> Estimate:
    """A model's calls follow one another; the slowest rank or line decides how fast."""
    passing = traffic_of(sums, placement, links).forward
    work = (sums.forward + sums.once).tolist()
    busy = [0.0] * len(slots)
    for stage, rank in enumerate(placement):
        busy[rank] += work[stage]
    lines: dict[tuple[int, int], float] = {}
    for (here, there), passes in passing.items():
        ranks = placement[here], placement[there]
        lines[ranks] = lines.get(ranks, 0.0) + (passes.line if ranks[0] != ranks[1] else 0.0)
    order = order_of("gpipe", len(slots), 1, 1)
    memory, _ = rank_memory(sums, order, options, 1)
    done: list[float] = []
    for stage, seconds in enumerate(work):
        arrivals = (done[a] + p.line for (a, b), p in passing.items() if b == stage)
        done.append(max(arrivals, default=0.0) + seconds)
    step = max([*busy, *lines.values()])
    return Estimate(step, max(done), 1, slots, busy, memory)


def once_a_step(
    sums: Sums, placement: Sequence[int], memory: Sequence[SlotMemory], cluster: Cluster
) -> list[float]:
    """Seconds of each rank behind its last backward: gradients put together, and the update."""
    found = [0.0] * len(memory)
    for stage, rank in enumerate(placement):
        found[rank] += float(sums.once[stage])
    for rank, held in enumerate(memory):
        found[rank] += UPDATE_PASSES * held.updated / cluster.device.bandwidth
    return found


@dataclass(frozen=True, slots=True)
class RankLinks:
    """What links two ranks: the slowest of the links of slots at the same place."""

    cluster: Cluster
    hosts: Sequence[tuple[int, ...]]
    """Of each rank, the host of each slot."""

    @classmethod
    def of(cls, cluster: Cluster, slots: Sequence[Sequence[str]]) -> RankLinks:
        """The links between ranks of these slots. Raises PlanError for one that is not there."""
        hosts = {device: number for number, host in enumerate(cluster.hosts) for device in host}
        if unknown := [device for devices in slots for device in devices if device not in hosts]:
            raise PlanError(
                f"the plan names the device slot {unknown[0]!r}, which the cluster lacks; it has "
                f"{', '.join(cluster.devices[:8])}{', …' if len(hosts) > 8 else ''}"
            )
        return cls(cluster, [tuple(hosts[device] for device in devices) for devices in slots])

    def seconds(self, here: int, there: int, messages: int, nbytes: float) -> float:
        """The time of messages one after another."""
        same = self.hosts[here] == self.hosts[there]
        link = (self.cluster.inside if same else self.cluster.between).send
        return messages * link.latency + nbytes / link.bandwidth


def traffic_of(sums: Sums, placement: Sequence[int], links: RankLinks) -> Traffic:
    """What stages send each other for a microbatch."""
    forward, backward = {}, {}
    for sent in sums.traffic:
        ranks = placement[sent.giver], placement[sent.taker]
        line = links.seconds(ranks[0], ranks[1], sent.values, sent.bytes)
        forward[sent.giver, sent.taker] = Passing(line, 0.0)
        if sent.answers:
            line = links.seconds(ranks[1], ranks[0], sent.answers, sent.answer_bytes)
            backward[sent.taker, sent.giver] = Passing(line, 0.0)
    return Traffic(forward, backward)
