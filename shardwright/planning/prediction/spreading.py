"""From a plan to its forward spread over a stage's mesh: what `predict` begins with.

The stages of a plan have meshes of the same axes. A node on a mesh of its own (a lookup table that
is cut over all slots of a model) counts as whole, in the stage of what reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.ir import IRGraph
from shardwright.layout import Cluster, Mesh
from shardwright.planning.assemble import planned, step_of
from shardwright.planning.forward import forward_view
from shardwright.planning.plan import Assignment, Plan, assignments, check_belongs
from shardwright.planning.prediction.pricing import price
from shardwright.planning.prediction.spread import Forward, Splits, Spread, spread
from shardwright.planning.training import Options
from shardwright.profiling.cost import Costs


@dataclass(frozen=True, slots=True)
class SpreadPlan:
    """A plan's forward, spread, with the stage of each node and the slots of each rank."""

    spread: Spread
    stages: Sequence[int]
    options: Options
    slots: Sequence[Sequence[str]]


def spread_of_plan(graph: IRGraph, plan: Plan, cluster: Cluster, costs: Costs) -> SpreadPlan:
    """What a plan spreads over the mesh of a stage. Raises PlanError."""
    check_belongs(plan, graph)
    source = forward_of(graph, plan)
    assigned = list(assignments(plan, len(source.view.nodes)))
    slots, stages, options = _in_stages(plan, source, assigned)
    first = next(found.mesh for found in assigned if set(found.mesh.devices) == set(slots[0]))
    splits = [
        found.splits if found.mesh.axes == first.axes else _whole(first) for found in assigned
    ]
    return SpreadPlan(spread_over(source, first, splits, cluster, costs), stages, options, slots)


def spread_over(
    source: Forward,
    mesh: Mesh,
    splits: Sequence[Splits],
    cluster: Cluster,
    costs: Costs,
    reasons: Sequence[str] = (),
) -> Spread:
    """A forward over the mesh of a stage, under these splits."""
    priced = price(source, mesh, splits, cluster, costs)
    axes = dict(zip(mesh.axes, mesh.sizes, strict=True))
    return spread(source, axes, splits, priced.nodes, priced.once, priced.fetched, reasons)


def forward_of(graph: IRGraph, plan: Plan) -> Forward:
    """What a plan assigns."""
    if plan.training is None:
        whole = planned(graph, plan)
        return Forward(whole, whole, frozenset(), training=False)
    step = step_of(graph, plan)
    return Forward(step.graph, forward_view(step.graph), step.prepare, training=True)


def _in_stages(
    plan: Plan, source: Forward, assigned: Sequence[Assignment]
) -> tuple[Sequence[Sequence[str]], Sequence[int], Options]:
    """The slots of each rank, the stage of each node, and the options of the schedule."""
    training = plan.training
    if training is not None:
        options = Options(
            training.microbatches,
            training.schedule,
            training.chunks,
            training.recompute,
            training.memory,
            training.zero,
        )
        return training.slots, training.stages, options
    stages = plan.stages or _stages_by_mesh(source, assigned)
    slots: dict[int, Sequence[str]] = {}
    for stage, found in zip(stages, assigned, strict=True):
        before = slots.setdefault(stage, found.mesh.devices)
        slots[stage] = min(before, found.mesh.devices, key=len)
    ranks = {
        devices: rank for rank, devices in enumerate(dict.fromkeys(map(tuple, slots.values())))
    }
    return list(ranks), [ranks[tuple(slots[stage])] for stage in stages], Options(schedule="gpipe")


def _stages_by_mesh(source: Forward, assigned: Sequence[Assignment]) -> list[int]:
    """Stages of a model's plan: a new one for each mesh, in order.

    Where a node's slots are those of several stages, it is in the stage of what reads it.
    """
    counts = {found.mesh: 0 for found in assigned}
    for found in assigned:
        counts[found.mesh] += 1
    devices = {mesh: frozenset(mesh.devices) for mesh in counts}
    wide = {m for m in counts if any(devices[other] < devices[m] for other in counts)}
    numbers: dict[Mesh, int] = {}
    stages = [0] * len(assigned)
    for i, found in enumerate(assigned):
        if found.mesh not in wide:
            stages[i] = numbers.setdefault(found.mesh, len(numbers))
    for i in reversed(range(len(assigned))):
        if assigned[i].mesh in wide:
            outputs = source.view.nodes[i].outputs
            users = (user for v in outputs for user in source.view.values[v].users)
            stages[i] = min((stages[source.position[user]] for user in users), default=0)
    return stages


def _whole(mesh: Mesh) -> Splits:
    return (None,) * mesh.ndim
