"""Plans over a mesh: stages by a partitioner or of balanced loads, splits by the rules of its axes.

A stage's nodes are all on its rank, split there as the other axes of the mesh say; a rank of
several replicas has an axis ``data`` of its own. The forward of a training step is cut in one
virtual stage or several for each rank, as its schedule has them; what is done once a step is in the
stage of what reads it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import msgspec

from shardwright.clusters import Cluster, Mesh
from shardwright.costs import Costs
from shardwright.errors import PlanError
from shardwright.ir import IRGraph
from shardwright.ir.graph import is_step
from shardwright.planning.assemble import make_plan
from shardwright.planning.options import StepOptions
from shardwright.planning.partition import Partition, Task
from shardwright.planning.partitioners import PARTITIONERS
from shardwright.planning.pipeline import (
    check_stages,
    measure_loads,
    measure_training,
    measure_work,
    stage_bounds,
)
from shardwright.planning.plan import (
    Assignment,
    Plan,
    Split,
    Terms,
    TrainingPlan,
    fingerprint_graph,
)
from shardwright.planning.rules import DATA, PIPELINE, split_nodes, take_apart
from shardwright.planning.step import (
    PreparedStep,
    as_step,
    check_one_backward,
    is_mixed_by_shards,
    mixing_notes,
    with_prepared,
)
from shardwright.planning.step_graph import forward_view
from shardwright.schedules import Schedule

PIPEDREAM = "pipedream"
SLACK = 1.01
"""A training step's cut may exceed the smallest largest load by this where fewer bytes cross."""


@dataclass(frozen=True, slots=True)
class PlanMachines:
    """What a plan is made for: the slots, what nodes cost there, and the bytes of each slot.

    ``memory`` is None where it is not known.
    """

    cluster: Cluster
    costs: Costs
    memory: float | None = None


class StageCut(NamedTuple):
    """The stage of each node, the rank of each stage, and how many slots each rank has."""

    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    replicas: tuple[int, ...]
    notes: tuple[str, ...] = ()


def plan_over_mesh(
    graph: IRGraph, axes: Mapping[str, int], label: str, names: Sequence[str], options: StepOptions
) -> Plan:
    """The plan of a model or a training step over a mesh. Raises PlanError.

    The largest share of the work, or of the stored bytes, that any stage has is as small as can be.
    """
    apart, unfused = take_apart(graph, axes)
    if not is_step(graph):
        ranks = axes.get(PIPELINE, 1)
        cut = _balanced(apart, axes, tuple(range(ranks)))
        made = _plan_model(apart, cut, axes, label, names)
        fingerprint = fingerprint_graph(graph)
        return msgspec.structs.replace(made, fingerprint=fingerprint, unfused=unfused, stages=())
    step = _step_of(graph, apart, axes, options)
    schedule = options.schedule_on(axes.get(PIPELINE, 1))
    cut = _balanced(step.view, axes, schedule.placement, step, options.microbatches)
    made = _plan_step(step, cut, axes, label, names, options)
    return _with_mixing_notes(made, graph, apart, unfused)


def plan_by_partition(
    graph: IRGraph,
    axes: Mapping[str, int],
    policy: str,
    machines: PlanMachines,
    options: StepOptions,
) -> Plan:
    """The plan of a model or a training step whose stages a partitioner makes. Raises PlanError.

    The machines have as many slots as the mesh with these axes; ``options`` are for steps.
    """
    _check_axes(policy, axes)
    mesh = "".join(f", {axis} {size}" for axis, size in axes.items() if len(axes) > 1)
    label = f"{policy}{mesh}"
    names = machines.cluster.devices
    apart, unfused = take_apart(graph, axes)
    if not is_step(graph):
        found = _partition(apart, tuple(range(axes[PIPELINE])), policy, axes, machines)
        made = _plan_model(apart, _cut_of(found), axes, label, names)
        return msgspec.structs.replace(made, fingerprint=fingerprint_graph(graph), unfused=unfused)
    step = _step_of(graph, apart, axes, options)
    found = _partition_step(step, policy, axes, machines, options)
    if max(found.replicas) > 1 and is_mixed_by_shards(graph, max(found.replicas)):
        found = _partition_step(step, policy, axes, machines, options, rows=1)
        note = "one slot a stage: some operators have statistics of a whole batch"
        found = msgspec.structs.replace(found, notes=(*found.notes, note))
    made = _plan_step(step, _cut_of(found), axes, label, names, options)
    return _with_mixing_notes(made, graph, apart, unfused)


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
    names = tuple(f"d{i}" for i in range(sum(partition.replicas)))
    axes = {PIPELINE: len(partition.replicas)}
    made = _plan_model(graph, _cut_of(partition), axes, partition.policy, names)
    return msgspec.structs.replace(
        made, fingerprint=fingerprint_graph(graph), cluster=Cluster((names,))
    )


# --- stages ---------------------------------------------------------------------------------------


def _balanced(
    forward: IRGraph,
    axes: Mapping[str, int],
    placement: tuple[int, ...],
    step: PreparedStep | None = None,
    microbatches: int = 1,
) -> StageCut:
    """Contiguous stages of balanced loads; the first nodes of a step, done once, are in none."""
    replicas = (1,) * axes.get(PIPELINE, 1)
    if step is None:
        bounds = stage_bounds(forward, measure_loads(forward), len(placement))
    else:
        loads = measure_training(step, forward, microbatches)
        bounds = stage_bounds(forward, loads, len(placement), first=len(step.prepare), slack=SLACK)
    stages = [stage for stage, (a, b) in enumerate(pairwise(bounds)) for _ in range(a, b)]
    return StageCut(tuple(stages), placement, replicas)


def _cut_of(found: Partition) -> StageCut:
    return StageCut(found.stages, found.ranks, found.replicas, found.notes)


def _check_axes(policy: str, axes: Mapping[str, int]) -> None:
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


def _partition_step(
    step: PreparedStep,
    policy: str,
    axes: Mapping[str, int],
    machines: PlanMachines,
    options: StepOptions,
    rows: int | None = None,
) -> Partition:
    """A training step's stages, on the ranks of its schedule."""
    schedule = options.schedule_on(axes[PIPELINE])
    if policy == PIPEDREAM and schedule.chunks > 1:
        raise PlanError(
            f"policy {policy!r} makes one stage a rank, and the schedule {options.schedule!r} has "
            f"{schedule.chunks}; take gpipe, 1f1b or zb-h1"
        )
    return _partition(
        step.view, schedule.placement, policy, axes, machines, step, options, schedule, rows
    )


def _partition(
    view: IRGraph,
    placement: tuple[int, ...],
    policy: str,
    axes: Mapping[str, int],
    machines: PlanMachines,
    step: PreparedStep | None = None,
    options: StepOptions | None = None,
    schedule: Schedule | None = None,
    rows: int | None = None,
) -> Partition:
    first = 0 if step is None else len(step.prepare)
    stages = 1 if policy == PIPEDREAM else len(placement)
    chunks = 1 if schedule is None else schedule.chunks
    check_stages(len(view.nodes) - first, stages, view.name, chunks)
    whole = Mesh.of(axes, machines.cluster.devices)
    task = Task(
        view,
        placement,
        machines.cluster,
        machines.costs,
        memory=machines.memory,
        slots=math.prod(axes.values()) // axes[PIPELINE],
        shards=axes.get(DATA, 1),
        leaders=tuple(mesh.devices[0] for mesh in whole.along(whole.axis(PIPELINE))),
    )
    if step is not None and options is not None:
        task = replace(
            task,
            step=step.graph,
            first=first,
            microbatches=options.microbatches,
            schedule=options.schedule,
            rows=rows,
            recompute=options.recompute != "none",
        )
    return PARTITIONERS[policy](task)


# --- plans of stages ------------------------------------------------------------------------------


def _plan_model(
    graph: IRGraph, cut: StageCut, axes: Mapping[str, int], label: str, names: Sequence[str]
) -> Plan:
    """A model's nodes on the slots of their stages."""
    assigned, notes = _assigned(graph, axes, _meshes(axes, names, cut), cut, cut.stages)
    made = make_plan(graph, label, names, assigned, [*cut.notes, *notes])
    return msgspec.structs.replace(made, stages=cut.stages)


def _step_of(
    graph: IRGraph, apart: IRGraph, axes: Mapping[str, int], options: StepOptions
) -> PreparedStep:
    options.check(axes)
    check_one_backward(graph)
    return as_step(apart, options.microbatches, axes.get(DATA, 1))


def _plan_step(
    step: PreparedStep,
    cut: StageCut,
    axes: Mapping[str, int],
    label: str,
    names: Sequence[str],
    options: StepOptions,
) -> Plan:
    """A training step's forward nodes on the slots of their stages, and its plan in time."""
    stages = with_prepared(step.view, cut.stages)
    forward, meshes = step.view, _meshes(axes, names, cut)
    assigned, notes = _assigned(forward, axes, meshes, cut, stages)
    work = measure_work(step, forward, options.microbatches)
    training = training_plan(options, options.schedule_on(len(meshes)), meshes, stages, work)
    made = make_plan(forward, label, names, assigned, [*cut.notes, *notes], work=work)
    return msgspec.structs.replace(made, training=training)


def _with_mixing_notes(
    made: Plan, graph: IRGraph, apart: IRGraph, unfused: tuple[int, ...]
) -> Plan:
    """The plan of a step's graph, with notes of what mixes the rows of its batch."""
    assert made.training is not None
    shards = max(
        dict(zip(found.mesh.axes, found.mesh.sizes, strict=True)).get(DATA, 1)
        for found in made.assignments
    )
    notes = mixing_notes(forward_view(apart), made.training.microbatches, shards)
    return msgspec.structs.replace(
        made,
        fingerprint=fingerprint_graph(graph),
        unfused=unfused,
        notes=(*made.notes, *notes),
    )


def _meshes(axes: Mapping[str, int], names: Sequence[str], cut: StageCut) -> list[Mesh]:
    """The mesh of each rank."""
    if max(cut.replicas) > 1:
        ends = accumulate(cut.replicas, initial=0)
        return [Mesh((DATA,), (b - a,), tuple(names[a:b])) for a, b in pairwise(ends)]
    whole = Mesh.of(axes, names)
    return list(whole.along(whole.axis(PIPELINE))) if PIPELINE in axes else [whole]


def _assigned(
    graph: IRGraph,
    axes: Mapping[str, int],
    meshes: Sequence[Mesh],
    cut: StageCut,
    stages: Sequence[int],
) -> tuple[list[Assignment], list[str]]:
    """Each node on the mesh of its rank, split as the mesh's axes say, and notes."""
    splits: dict[tuple[int, ...], list[tuple[Split | Terms | None, ...]]] = {}
    notes: dict[str, None] = {}
    for mesh in meshes:
        if mesh.sizes not in splits:
            inner = dict(zip(mesh.axes, mesh.sizes, strict=True))
            outer = {axis: size for axis, size in axes.items() if axis == PIPELINE}
            splits[mesh.sizes], found = split_nodes(graph, {**outer, **inner})
            notes |= dict.fromkeys(found)
    there = [meshes[cut.ranks[stage]] for stage in stages]
    assigned = [Assignment(mesh, splits[mesh.sizes][i]) for i, mesh in enumerate(there)]
    return assigned, list(notes)


def training_plan(
    options: StepOptions,
    schedule: Schedule,
    ranks: Sequence[Mesh],
    stages: Sequence[int],
    work: Sequence[int],
) -> TrainingPlan:
    """How a step is cut in time, from the stage and the work of each node."""
    return TrainingPlan(
        microbatches=options.microbatches,
        schedule=options.schedule,
        chunks=schedule.chunks,
        placement=schedule.placement,
        slots=tuple(mesh.devices for mesh in ranks),
        stages=tuple(stages),
        work=stage_work(work, stages, schedule.stages),
        recompute=options.recompute,
        memory=options.memory,
        zero=options.zero,
    )


def stage_work(work: Sequence[int], stages: Sequence[int], count: int) -> tuple[int, ...]:
    """The work of each stage, from that of each node."""
    found = [0] * count
    for stage, amount in zip(stages, work, strict=True):
        found[stage] += amount
    return tuple(found)
