"""Plans from partitions: whoever made the stages, a plan of a model or of a training step.

Comes in: a graph, the name of a partitioner, a mesh whose axis ``pipeline`` has the ranks, and the
machines. Goes out: assignments, stages and copies, as a plan has them. What always holds: a stage's
nodes are all on its rank, split there as the other axes of the mesh say; a rank of several replicas
has an axis ``data`` of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import msgspec

from shardwright.clusters import Cluster, Mesh
from shardwright.costs import Costs
from shardwright.errors import PlanError
from shardwright.ir import IRGraph
from shardwright.ir.graph import is_step
from shardwright.planning.assemble import make_plan
from shardwright.planning.copies import with_copies
from shardwright.planning.options import StepOptions
from shardwright.planning.partition import Partition, Task
from shardwright.planning.partitioners import PARTITIONERS
from shardwright.planning.pipeline import check_stages
from shardwright.planning.plan import (
    Assignment,
    Copy,
    Plan,
    Split,
    Terms,
    TrainingPlan,
    fingerprint_graph,
)
from shardwright.planning.prediction.sources import Sources
from shardwright.planning.rules import DATA, PIPELINE, split_nodes, take_apart
from shardwright.planning.step import PreparedStep, check_one_backward
from shardwright.planning.training import measure_work, training_plan, with_prepared

PIPEDREAM = "pipedream"


@dataclass(frozen=True, slots=True)
class PlanMachines:
    """What a plan is made for: the slots, what nodes cost there, and the bytes of each slot.

    ``memory`` is None where it is not known.
    """

    cluster: Cluster
    costs: Costs
    memory: float | None = None


@dataclass(frozen=True, slots=True)
class Partitioned:
    """A partition as a plan has it: of ``graph``, which has the copies.

    Of a model ``stages`` is the stage of each node, of a step ``training`` has them.
    """

    graph: IRGraph
    assigned: list[Assignment]
    stages: tuple[int, ...]
    copies: tuple[Copy, ...]
    notes: list[str]
    work: list[int] | None = None
    training: TrainingPlan | None = None


def plan_by_partition(
    graph: IRGraph,
    axes: Mapping[str, int],
    policy: str,
    machines: PlanMachines,
    options: StepOptions,
) -> Plan:
    """The plan of a model or a training step by a partitioner.

    The machines have as many slots as the mesh with these axes; ``options`` are for steps.
    Raises PlanError.
    """
    check_axes(policy, axes)
    apart, unfused = take_apart(graph, axes)
    sources = Sources(graph)
    sources.note_apart(apart, unfused)
    if sources.training:
        options.check(axes)
        check_one_backward(graph)
        step = sources.step(unfused, options.microbatches, axes.get(DATA, 1))
        found = partition_step(step, sources, policy, axes, machines, options)
        shards = max(_shards(assignment.mesh) for assignment in found.assigned)
        found.notes.extend(sources.mixing_notes(unfused, options.microbatches, shards))
    else:
        found = partition_model(apart, policy, axes, machines)
    mesh = "".join(f", {axis} {size}" for axis, size in axes.items() if len(axes) > 1)
    made = make_plan(
        found.graph,
        f"{policy}{mesh}",
        machines.cluster.devices,
        found.assigned,
        found.notes,
        work=found.work,
        fingerprint=sources.fingerprint,
    )
    return msgspec.structs.replace(
        made,
        unfused=unfused,
        training=found.training,
        stages=found.stages,
        copies=found.copies,
    )


def _shards(mesh: Mesh) -> int:
    """In how many shards of the batch a mesh's slots are."""
    return dict(zip(mesh.axes, mesh.sizes, strict=True)).get(DATA, 1)


def check_axes(policy: str, axes: Mapping[str, int]) -> None:
    """Raise PlanError for a mesh on which a partitioner cannot put stages."""
    if PIPELINE not in axes:
        raise PlanError(
            f"policy {policy!r} makes stages, but the mesh has no axis {PIPELINE!r}; add it, or "
            "leave the policy out"
        )
    if policy == PIPEDREAM and len(axes) > 1:
        raise PlanError(
            f"policy {policy!r} decides by itself how many slots a stage has; give it devices, or "
            f"a mesh of {PIPELINE!r} alone"
        )


def partition_model(
    graph: IRGraph, policy: str, axes: Mapping[str, int], machines: PlanMachines
) -> Partitioned:
    """A model's stages. Raises PlanError."""
    placement = tuple(range(axes[PIPELINE]))
    check_stages(len(graph.nodes), 1 if policy == PIPEDREAM else len(placement), graph.name)
    slots, shards = _sharing(axes)
    task = Task(
        graph,
        placement,
        machines.cluster,
        machines.costs,
        memory=machines.memory,
        slots=slots,
        shards=shards,
        leaders=_leaders(axes, machines.cluster.devices),
    )
    return _on_slots(graph, PARTITIONERS[policy](task), axes, machines.cluster.devices)


def _on_slots(
    graph: IRGraph, found: Partition, axes: Mapping[str, int], devices: Sequence[str]
) -> Partitioned:
    """A model's nodes on the slots of their stages."""
    copied, stages = with_copies(graph, found.copies, found.stages)
    meshes = _meshes(axes, devices, found)
    assigned, notes = _assigned(copied, axes, meshes, [found.ranks[stage] for stage in stages])
    return Partitioned(copied, assigned, tuple(stages), found.copies, [*found.notes, *notes])


def plan_of_partition(graph: IRGraph, partition: Partition) -> Plan:
    """The plan of a model that was partitioned before, a slot a replica of a rank.

    Raises PlanError where the partition is of another graph, and for training steps, whose plans
    have a schedule: `plan` makes those.
    """
    if is_step(graph):
        raise PlanError(
            f"{graph.name!r} is a training step; plan it with plan(graph, policy=...), which also "
            "gives its stages a schedule"
        )
    if len(partition.stages) != len(graph.nodes):
        raise PlanError(
            f"the partition of {partition.graph!r} has stages of {len(partition.stages)} nodes, "
            f"the graph {graph.name!r} has {len(graph.nodes)}; partition this graph"
        )
    devices = tuple(f"d{i}" for i in range(sum(partition.replicas)))
    found = _on_slots(graph, partition, {PIPELINE: len(partition.replicas)}, devices)
    made = make_plan(found.graph, partition.policy, devices, found.assigned, found.notes)
    return msgspec.structs.replace(
        made,
        fingerprint=fingerprint_graph(graph),
        stages=found.stages,
        copies=found.copies,
        cluster=Cluster((devices,)),
    )


def _sharing(axes: Mapping[str, int]) -> tuple[int, int]:
    """How many slots each rank has, and how many shards of the batch."""
    return math.prod(axes.values()) // axes[PIPELINE], axes.get(DATA, 1)


def _leaders(axes: Mapping[str, int], devices: Sequence[str]) -> tuple[str, ...]:
    """The first slot of each rank."""
    whole = Mesh.of(axes, devices)
    return tuple(mesh.devices[0] for mesh in whole.along(whole.axis(PIPELINE)))


def partition_step(
    step: PreparedStep,
    sources: Sources,
    policy: str,
    axes: Mapping[str, int],
    machines: PlanMachines,
    options: StepOptions,
) -> Partitioned:
    """A training step's stages, on the ranks of its schedule. Raises PlanError."""
    found = _partition(step, policy, axes, machines, options)
    if max(found.replicas) > 1 and sources.is_mixed(max(found.replicas)):
        found = _partition(step, policy, axes, machines, options, rows=1)
        note = "one slot a stage: some operators have statistics of a whole batch"
        found = msgspec.structs.replace(found, notes=(*found.notes, note))
    step, stages = _with_copies(step, found)
    return _on_ranks(step, stages, found, axes, machines, options)


def _partition(
    step: PreparedStep,
    policy: str,
    axes: Mapping[str, int],
    machines: PlanMachines,
    options: StepOptions,
    rows: int | None = None,
) -> Partition:
    schedule = options.schedule_on(axes[PIPELINE])
    view = step.view
    first = len(step.prepare)
    if policy == PIPEDREAM and schedule.chunks > 1:
        raise PlanError(
            f"policy {policy!r} makes one stage a rank, and the schedule {options.schedule!r} has "
            f"{schedule.chunks}; take gpipe, 1f1b or zb-h1"
        )
    stages = 1 if policy == PIPEDREAM else schedule.stages
    check_stages(len(view.nodes) - first, stages, step.graph.name, schedule.chunks)
    return PARTITIONERS[policy](
        Task(
            view,
            schedule.placement,
            machines.cluster,
            machines.costs,
            step.graph,
            first,
            options.microbatches,
            options.schedule,
            machines.memory,
            rows,
            options.recompute != "none",
            *_sharing(axes),
            leaders=_leaders(axes, machines.cluster.devices),
        )
    )


def _with_copies(step: PreparedStep, found: Partition) -> tuple[PreparedStep, list[int]]:
    """The step with what stages do again, and the stage of each of its forward nodes."""
    first = len(step.prepare)
    stages = with_prepared(step.view, found.stages)
    copies = _shifted(found.copies, first)
    if not copies:
        return step, stages
    graph, stages = with_copies(step.graph, copies, stages)
    return replace(step, graph=graph, forward=step.forward + len(copies)), stages


def _shifted(copies: Sequence[Copy], first: int) -> tuple[Copy, ...]:
    return tuple(Copy(copy.node + first, copy.stage) for copy in copies)


def _on_ranks(
    step: PreparedStep,
    stages: list[int],
    found: Partition,
    axes: Mapping[str, int],
    machines: PlanMachines,
    options: StepOptions,
) -> Partitioned:
    """The partitioned step, and its plan in time."""
    forward = step.view
    meshes = _meshes(axes, machines.cluster.devices, found)
    schedule = options.schedule_on(len(meshes))
    assigned, notes = _assigned(forward, axes, meshes, [found.ranks[stage] for stage in stages])
    work = measure_work(step, forward, options.microbatches)
    training = training_plan(options, schedule, meshes, stages, work)
    copies = _shifted(found.copies, len(step.prepare))
    notes = [*found.notes, *notes]
    return Partitioned(forward, assigned, (), copies, notes, work, training)


def _meshes(axes: Mapping[str, int], devices: Sequence[str], found: Partition) -> list[Mesh]:
    """The mesh of each rank."""
    if max(found.replicas) == 1:
        whole = Mesh.of(axes, devices)
        return list(whole.along(whole.axis(PIPELINE)))
    ends = list(accumulate(found.replicas, initial=0))
    return [
        Mesh((DATA,), (stop - start,), tuple(devices[start:stop])) for start, stop in pairwise(ends)
    ]


def _assigned(
    graph: IRGraph, axes: Mapping[str, int], meshes: Sequence[Mesh], ranks: Sequence[int]
) -> tuple[list[Assignment], list[str]]:
    """Each node on the mesh of its rank, split as the mesh's axes say, and notes."""
    splits: dict[tuple[int, ...], list[tuple[Split | Terms | None, ...]]] = {}
    notes: dict[str, None] = {}
    for mesh in meshes:
        if mesh.sizes not in splits:
            inner = dict(zip(mesh.axes, mesh.sizes, strict=True))
            splits[mesh.sizes], found = split_nodes(graph, {PIPELINE: len(meshes), **inner})
            notes |= dict.fromkeys(found)
    assigned = [
        Assignment(meshes[rank], splits[meshes[rank].sizes][i]) for i, rank in enumerate(ranks)
    ]
    return assigned, list(notes)
