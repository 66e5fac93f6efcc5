"""What a plan is predicted to take: its forward is placed on the meshes of its stages.

Each node is placed on the mesh of its own rank; ranks may have different numbers of devices. A node
on a mesh of its own (a lookup table that is cut over all devices of a model) counts as whole, in
the stage of what reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.autodiff.needed import trained_parameters
from shardwright.clusters import Cluster, Mesh
from shardwright.costs.cost import Analytic, Costs
from shardwright.costs.placed import Forward, PlacedCosts
from shardwright.costs.predict import Estimate, Prediction, estimate
from shardwright.costs.storages import place_costs
from shardwright.ir import IRGraph
from shardwright.planning.assemble import planned, step_of
from shardwright.planning.options import StepOptions, check_graph
from shardwright.planning.plan import Assignment, Plan, assignments, check_belongs, cluster_of
from shardwright.planning.rules import DATA
from shardwright.planning.step import PreparedStep
from shardwright.planning.step_graph import state_bytes
from shardwright.sharding.place import place
from shardwright.sharding.strategy import Choices


def predict(
    graph: IRGraph, plan: Plan, cluster: Cluster | None = None, costs: Costs | None = None
) -> Prediction:
    """Predict the time of a step and the memory of each device for a plan.

    By default ``cluster`` is the plan's own, and ``costs`` are estimated from shapes and the
    cluster's device. Raises PlanError if the plan is for another graph or names devices that the
    cluster does not have.
    """
    check_graph(graph)
    check_belongs(plan, graph)
    cluster = cluster or cluster_of(plan)
    source = forward_of(graph, plan)
    return (
        placed_plan(source, plan, cluster, costs or Analytic(cluster.device))
        .estimate(cluster)
        .prediction()
    )


@dataclass(frozen=True, slots=True)
class PlacedPlan:
    """A plan's forward, placed, with its stages.

    ``stages`` is the stage of each node, ``placement`` the rank of each stage, ``slots`` those of
    each rank, and ``shards`` how many of them share the batch.
    """

    placed: PlacedCosts
    stages: Sequence[int]
    placement: Sequence[int]
    slots: Sequence[Sequence[str]]
    options: StepOptions
    shards: Sequence[int]

    def estimate(self, cluster: Cluster) -> Estimate:
        """What it takes."""
        return estimate(
            self.placed,
            self.stages,
            self.options,
            cluster,
            self.slots,
            placement=self.placement,
            shards=self.shards,
        )


def forward_of(graph: IRGraph, plan: Plan) -> Forward:
    """What a plan assigns."""
    if plan.training is None:
        whole = planned(graph, plan)
        return Forward(whole, whole)
    return forward_of_step(step_of(graph, plan))


def forward_of_step(step: PreparedStep) -> Forward:
    """The forward of a step."""
    trained = trained_parameters(step.graph)
    return Forward(step.graph, step.view, step.prepare, True, trained, state_bytes(step.graph))


def placed_costs(
    source: Forward,
    mesh: Mesh,
    splits: Sequence[Choices],
    cluster: Cluster,
    costs: Costs,
    reasons: Sequence[str] = (),
    *,
    microbatches: int = 1,
) -> PlacedCosts:
    """A forward on the mesh of a stage, under these splits."""
    placed = place(
        source.outline,
        splits,
        mesh=mesh,
        cluster=cluster,
        training=source.training,
        microbatches=microbatches,
    )
    which = [0] * len(splits)
    return place_costs(source, [placed], which, costs, cluster.device, reasons)


def placed_plan(source: Forward, plan: Plan, cluster: Cluster, costs: Costs) -> PlacedPlan:
    """A plan's forward on the meshes of its stages. Raises PlanError."""
    assigned = list(assignments(plan, len(source.view.nodes)))
    stages, placement, slots, options = _in_stages(plan, source, assigned)
    ranks = _meshes_of_ranks(slots, assigned)
    kinds: dict[object, Mesh] = {}
    which = []
    for stage, found in zip(stages, assigned, strict=True):
        whole = ranks[placement[stage]]
        mesh = found.mesh if set(found.mesh.devices) == set(whole.devices) else whole
        kinds.setdefault((mesh.axes, mesh.sizes), mesh)
        which.append([*kinds].index((mesh.axes, mesh.sizes)))
    count = plan.training.microbatches if plan.training else 1
    placed = [
        place(
            source.outline,
            _splits_over(mesh, assigned),
            mesh=mesh,
            cluster=cluster,
            training=source.training,
            microbatches=count,
        )
        for mesh in kinds.values()
    ]
    found_costs = place_costs(source, placed, which, costs, cluster.device)
    shards = [dict(zip(mesh.axes, mesh.sizes, strict=True)).get(DATA, 1) for mesh in ranks]
    return PlacedPlan(found_costs, stages, placement, slots, options, shards)


def _meshes_of_ranks(slots: Sequence[Sequence[str]], assigned: Sequence[Assignment]) -> list[Mesh]:
    """The mesh of each rank's slots; of a rank that has no node of its own it is as another's."""
    meshes = {frozenset(found.mesh.devices): found.mesh for found in reversed(assigned)}
    known = [meshes.get(frozenset(devices)) for devices in slots]
    another = next((mesh for mesh in known if mesh is not None), assigned[0].mesh)
    return [mesh or another for mesh in known]


def _splits_over(mesh: Mesh, assigned: Sequence[Assignment]) -> list[Choices]:
    """What a mesh splits of all nodes, as if all were on it; those of other axes are whole."""
    whole = (None,) * mesh.ndim
    return [found.splits if found.mesh.axes == mesh.axes else whole for found in assigned]


def _in_stages(
    plan: Plan, source: Forward, assigned: Sequence[Assignment]
) -> tuple[Sequence[int], Sequence[int], Sequence[Sequence[str]], StepOptions]:
    """The stages of a plan, their ranks, the slots of each, and the options of the schedule."""
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
        return training.stages, training.placement, training.slots, options
    numbers = plan.stages or _stages_by_mesh(source, assigned)
    slots: dict[int, tuple[str, ...]] = {}
    for stage, found in zip(numbers, assigned, strict=True):
        before = slots.setdefault(stage, found.mesh.devices)
        slots[stage] = min(before, found.mesh.devices, key=len)
    order = {stage: position for position, stage in enumerate(sorted(slots))}
    ranks = list(dict.fromkeys(slots[stage] for stage in order))
    return (
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
            readers = (at for v in outputs for at, _ in source.outline.readers.get(v, ()))
            stages[i] = min((stages[at] for at in readers), default=stages[i])
    return stages
