"""From a plan to its forward spread over the meshes of its stages: what `predict` begins with.

Each node is spread over the mesh of its own rank; ranks may have different numbers of slots. A node
on a mesh of its own (a lookup table that is cut over all slots of a model) counts as whole, in the
stage of what reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.clusters import Cluster, Mesh
from shardwright.costs.cost import Costs
from shardwright.ir import IRGraph
from shardwright.planning.assemble import planned, shards_of, step_of
from shardwright.planning.options import StepOptions
from shardwright.planning.plan import Assignment, Plan, assignments, check_belongs
from shardwright.planning.prediction.merging import merged
from shardwright.planning.prediction.pricing import price
from shardwright.planning.prediction.source import Forward, Splits
from shardwright.planning.prediction.sources import Sources
from shardwright.planning.prediction.spread import Alike, Spread, spread
from shardwright.planning.rules import DATA


@dataclass(frozen=True, slots=True)
class Staged:
    """A plan in stages.

    ``stages`` is the stage of each node, ``placement`` the rank of each stage, ``slots`` those of
    each rank.
    """

    stages: Sequence[int]
    placement: Sequence[int]
    slots: Sequence[Sequence[str]]
    options: StepOptions


@dataclass(frozen=True, slots=True)
class SpreadPlan:
    """A plan's forward, spread, its stages, and how many slots share the batch in each rank."""

    spread: Spread
    staged: Staged
    shards: Sequence[int]


def spread_of_plan(
    graph: IRGraph,
    plan: Plan,
    cluster: Cluster,
    costs: Costs,
    sources: Sources | None = None,
) -> SpreadPlan:
    """What a plan spreads over the meshes of its stages. Raises PlanError.

    ``sources`` has the forms of the graph that are known.
    """
    if sources is None or sources.fingerprint != plan.fingerprint:
        check_belongs(plan, graph)
    source = forward_of(graph, plan, sources)
    assigned = list(assignments(plan, len(source.view.nodes)))
    staged = _in_stages(plan, source, assigned)
    ranks = _meshes_of_ranks(staged, assigned)
    kinds: dict[_Kind, Mesh] = {}
    which = []
    for stage, found in zip(staged.stages, assigned, strict=True):
        whole = ranks[staged.placement[stage]]
        mesh = found.mesh if set(found.mesh.devices) == set(whole.devices) else whole
        kinds.setdefault(_kind(mesh), mesh)
        which.append([*kinds].index(_kind(mesh)))
    spreads = [
        spread_over(source, mesh, _splits_over(mesh, assigned), cluster, costs)
        for mesh in kinds.values()
    ]
    shards = [dict(zip(mesh.axes, mesh.sizes, strict=True)).get(DATA, 1) for mesh in ranks]
    return SpreadPlan(merged(spreads, which), staged, shards)


_Kind = tuple[tuple[str, ...], tuple[int, ...]]


def _kind(mesh: Mesh) -> _Kind:
    """Equal for meshes over which nodes spread alike."""
    return tuple(mesh.axes), tuple(mesh.sizes)


def _meshes_of_ranks(staged: Staged, assigned: Sequence[Assignment]) -> list[Mesh]:
    """The mesh of each rank's slots; of a rank that has no node of its own it is as another's."""
    meshes = {frozenset(found.mesh.devices): found.mesh for found in reversed(assigned)}
    known = [meshes.get(frozenset(devices)) for devices in staged.slots]
    another = next((mesh for mesh in known if mesh is not None), assigned[0].mesh)
    return [mesh or another for mesh in known]


def _splits_over(mesh: Mesh, assigned: Sequence[Assignment]) -> list[Splits]:
    """What a mesh splits of all nodes, as if all were on it; those of other axes are whole."""
    return [found.splits if found.mesh.axes == mesh.axes else _whole(mesh) for found in assigned]


def spread_over(
    source: Forward,
    mesh: Mesh,
    splits: Sequence[Splits],
    cluster: Cluster,
    costs: Costs,
    reasons: Sequence[str] = (),
) -> Spread:
    """A forward over the mesh of a stage, under these splits."""
    axes = dict(zip(mesh.axes, mesh.sizes, strict=True))
    groups = Alike.of(source, axes, splits)
    priced = price(source, mesh, splits, cluster, costs, groups)
    nodes, once, gathered = priced.nodes, priced.once, priced.gathered
    return spread(source, axes, splits, nodes, once, gathered, groups, priced.fetched, reasons)


def forward_of(graph: IRGraph, plan: Plan, sources: Sources | None = None) -> Forward:
    """What a plan assigns."""
    if sources is not None and not plan.copies:
        training = plan.training
        count = 1 if training is None else training.microbatches
        return sources.forward(plan.unfused, count, shards_of(plan))
    if plan.training is None:
        whole = planned(graph, plan)
        return Forward(whole, whole, frozenset(), training=False)
    step = step_of(graph, plan)
    return Forward(step.graph, step.view, step.prepare, training=True)


def _in_stages(plan: Plan, source: Forward, assigned: Sequence[Assignment]) -> Staged:
    """The stages of a plan and their ranks, and the options of the schedule."""
    training = plan.training
    if training is not None:
        options = StepOptions(
            training.microbatches,
            training.schedule,
            training.chunks,
            training.recompute,
            training.memory,
            training.zero,
        )
        return Staged(training.stages, training.placement, training.slots, options)
    numbers = plan.stages or _stages_by_mesh(source, assigned)
    slots: dict[int, tuple[str, ...]] = {}
    for stage, found in zip(numbers, assigned, strict=True):
        before = slots.setdefault(stage, found.mesh.devices)
        slots[stage] = min(before, found.mesh.devices, key=len)
    order = {stage: position for position, stage in enumerate(sorted(slots))}
    ranks = list(dict.fromkeys(slots[stage] for stage in order))
    return Staged(
        [order[stage] for stage in numbers],
        [ranks.index(slots[stage]) for stage in order],
        ranks,
        StepOptions(schedule="gpipe"),
    )


def _stages_by_mesh(source: Forward, assigned: Sequence[Assignment]) -> list[int]:
    """Stages of a model's plan: a new one wherever the mesh changes, in order.

    Where a node's slots are those of several stages, it is in the stage of what reads it; what
    nobody reads is in the stage before it.
    """
    devices = {found.mesh: frozenset(found.mesh.devices) for found in assigned}
    wide = {mesh for mesh in devices if any(devices[o] < devices[mesh] for o in devices)}
    stages, stage, before = [], 0, None
    for found in assigned:
        if found.mesh not in wide:
            stage += before is not None and found.mesh != before
            before = found.mesh
        stages.append(stage)
    for i in reversed(range(len(assigned))):
        if assigned[i].mesh in wide:
            outputs = source.view.nodes[i].outputs
            users = (user for v in outputs for user in source.view.values[v].users)
            read = (stages[source.position[user]] for user in users)
            stages[i] = min(read, default=stages[i])
    return stages


def _whole(mesh: Mesh) -> Splits:
    return (None,) * mesh.ndim
