"""How a training step is put on a mesh: virtual stages, their ranks, their schedule.

Comes in: a `PreparedStep`, the axes of a mesh, and a schedule. Goes out: an assignment for each
forward node, and a `TrainingPlan`. The forward is cut in contiguous stages, one or several for each
pipeline rank, so that the largest share of a step's work that any of them has is as small as can
be, unless one would hold far more than its share of parameters, gradients and states.

What nodes take in the forward and the backward is that of `training_work`; the update counts with
the first node that reads a parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import msgspec

from shardwright.autodiff.needed import needing_gradients, trained_parameters
from shardwright.clusters import Mesh
from shardwright.costs.operations import STATE_PASSES, UPDATE_PASSES
from shardwright.ir import IRGraph
from shardwright.planning.assemble import make_plan
from shardwright.planning.options import StepOptions
from shardwright.planning.pipeline import (
    WORK_PER_BYTE,
    Loads,
    measure_loads,
    stage_bounds,
    training_work,
)
from shardwright.planning.plan import Assignment, Plan, TrainingPlan, fingerprint_graph
from shardwright.planning.rules import DATA, PIPELINE, split_nodes, take_apart
from shardwright.planning.step import PreparedStep, as_step, check_one_backward, mixing_notes
from shardwright.planning.step_graph import forward_view, parameters_of
from shardwright.schedules import Schedule

SLACK = 1.01
"""A cut may exceed the smallest largest load by this factor where fewer bytes cross."""
FULLNESS = 0.7
"""A stage may hold 1 / FULLNESS times its share of the bytes before that counts."""


@dataclass(frozen=True, slots=True)
class OnMesh:
    """A step put on a mesh: an assignment and the work of a microbatch for each forward node."""

    forward: IRGraph
    assigned: list[Assignment]
    work: list[int]
    training: TrainingPlan
    notes: list[str]


def over_training_mesh(
    step: PreparedStep, axes: Mapping[str, int], devices: Sequence[str], options: StepOptions
) -> OnMesh:
    """Put a step on slots of a mesh with these axes. Raises PlanError."""
    forward = forward_view(step.graph)
    splits, notes = split_nodes(forward, axes)
    whole = Mesh.of(axes, devices)
    ranks = whole.along(whole.axis(PIPELINE)) if PIPELINE in axes else (whole,)
    schedule = options.schedule_on(len(ranks))
    loads = measure_training(step, forward, options.microbatches)
    work = [after - before for before, after in pairwise(loads.work)]
    stages = _stages(step, forward, loads, schedule.stages)
    training = training_plan(options, schedule, ranks, stages, work)
    assigned = [
        Assignment(ranks[schedule.placement[stage]], split)
        for stage, split in zip(stages, splits, strict=True)
    ]
    return OnMesh(forward, assigned, work, training, notes)


def _stages(step: PreparedStep, forward: IRGraph, loads: Loads, count: int) -> list[int]:
    """The virtual stage of each node; what is done once a step has that of what reads it."""
    prepared = len(step.prepare)
    bounds = stage_bounds(forward, loads, count, first=prepared, slack=SLACK)
    stages: list[int] = []
    for stage, (start, stop) in enumerate(pairwise(bounds)):
        stages += [stage] * (stop - start)
    return with_prepared(forward, stages)


def with_prepared(forward: IRGraph, stages: Sequence[int]) -> list[int]:
    """The stage of each node, from those of the last nodes: first is what is done once a step."""
    prepared = len(forward.nodes) - len(stages)
    stages = [0] * prepared + list(stages)
    position = {node.id: i for i, node in enumerate(forward.nodes)}
    for i in reversed(range(prepared)):
        users = (user for v in forward.nodes[i].outputs for user in forward.values[v].users)
        stages[i] = min((stages[position[user]] for user in users), default=0)
    return stages


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


# --- what a step takes --------------------------------------------------------------------------


def measure_training(step: PreparedStep, forward: IRGraph, microbatches: int) -> Loads:
    """Work of a microbatch and stored bytes of every forward node of a step."""
    loads = measure_loads(forward, held_bytes(step.graph))
    total = list(accumulate(measure_work(step, forward, microbatches), initial=0))
    return Loads(
        total, loads.single, loads.shared, max(total[-1], 1), loads.total_bytes, fullness=FULLNESS
    )


def measure_work(step: PreparedStep, forward: IRGraph, microbatches: int) -> list[int]:
    """Work of a microbatch of every forward node of a step."""
    trained = trained_parameters(step.graph)
    needing = needing_gradients(forward, trained)
    moved = {v: UPDATE_PASSES * forward.values[v].nbytes for v in trained if v in forward.values}
    for value_id, parameter in parameters_of(step.graph).items():
        if step.graph.values[value_id].role == "state" and parameter in moved:
            moved[parameter] += STATE_PASSES * step.graph.values[value_id].nbytes
    seen: set[int] = set()
    work = []
    for node in forward.nodes:
        new = {v for v in node.inputs if v in trained} - seen
        seen |= new
        update = WORK_PER_BYTE * sum(moved[v] for v in new) / microbatches
        work.append(training_work(forward, node, needing) + round(update))
    return work


def held_bytes(graph: IRGraph) -> dict[int, int]:
    """What a slot holds of each parameter that a step trains: itself, its gradient, its state."""
    held = {value_id: 2 * graph.values[value_id].nbytes for value_id in trained_parameters(graph)}
    for value_id, parameter in parameters_of(graph).items():
        if graph.values[value_id].role == "state" and parameter in held:
            held[parameter] += graph.values[value_id].nbytes
    return held


def plan_step(
    graph: IRGraph, axes: Mapping[str, int], label: str, names: Sequence[str], options: StepOptions
) -> Plan:
    """The plan of a training step over a mesh. Raises PlanError."""
    options.check(axes)
    check_one_backward(graph)
    apart, unfused = take_apart(graph, axes)
    shards = axes.get(DATA, 1)
    step = as_step(apart, options.microbatches, shards)
    put = over_training_mesh(step, axes, names, options)
    put.notes.extend(mixing_notes(forward_view(apart), options.microbatches, shards))
    made = make_plan(put.forward, label, names, put.assigned, put.notes, work=put.work)
    return msgspec.structs.replace(
        made, fingerprint=fingerprint_graph(graph), unfused=unfused, training=put.training
    )
