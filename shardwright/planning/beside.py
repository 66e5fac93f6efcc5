"""A plan for another graph of a training step's model, on the same slots.

Comes in: the graph (an evaluation, or the same step for batches of another shape), the step's graph
and the step's plan. Goes out: a plan in which what reads a parameter runs where the step has the
parameter, split as the step splits it. What always holds: nodes stand in stages that never go back,
so that what flows between them flows one way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from shardwright.clusters import Mesh
from shardwright.errors import PlanError
from shardwright.ir import IRGraph, IRNode
from shardwright.ir.steps import is_step
from shardwright.planning.assemble import make_plan, shards_of, step_of
from shardwright.planning.beside_splits import Part, node_keys, parts_of, splits_beside
from shardwright.planning.fusions import find_fusions
from shardwright.planning.mesh import whole_notes
from shardwright.planning.plan import (
    Assignment,
    Plan,
    TrainingPlan,
    fingerprint_graph,
    input_texts,
)
from shardwright.planning.step import Step, as_step, check_one_backward
from shardwright.planning.training import Options, measure_work, stage_work, with_prepared
from shardwright.planning.unfuse import unfuse


def plan_beside(graph: IRGraph, step_graph: IRGraph, plan: Plan, microbatches: int = 1) -> Plan:
    """The plan of ``graph``, a forward or a step, on the slots of a planned training step.

    A step has the schedule of that one, with so many microbatches of its own. Raises PlanError
    where ``plan`` is of no training step, or the graph cannot be cut or split that way.
    """
    if plan.training is None:
        raise PlanError(f"the plan for {plan.graph!r} is of no training step")
    unfused = _taken_apart(graph, step_graph, plan)
    apart = unfuse(graph, unfused)
    if not is_step(graph):
        made, stages = _beside(apart, step_graph, plan)
        _check_used(graph, made)
        made = msgspec.structs.replace(made, stages=tuple(stages))
    else:
        check_one_backward(graph)
        step = as_step(apart, microbatches, shards_of(plan))
        work = measure_work(step, step.view, microbatches)
        made, stages = _beside(step.view, step_graph, plan, len(step.prepare), work)
        training = _in_time(plan.training, microbatches, stages, work)
        made = msgspec.structs.replace(made, training=training)
    return msgspec.structs.replace(
        made, fingerprint=fingerprint_graph(graph), unfused=unfused, cluster=plan.cluster
    )


def _beside(
    graph: IRGraph,
    step_graph: IRGraph,
    plan: Plan,
    prepared: int = 0,
    work: Sequence[int] | None = None,
) -> tuple[Plan, list[int]]:
    """The plan of a forward, and the stage of each node; the first ``prepared`` run once a step."""
    assert plan.training is not None
    meshes = {
        stage: plan.assignments[plan.nodes[i]].mesh for i, stage in enumerate(plan.training.stages)
    }
    step = step_of(step_graph, plan)
    stages = _stages(graph, step, plan.training, meshes, prepared)
    if prepared:
        stages = with_prepared(graph, stages[prepared:])
    there = [meshes[stage] for stage in stages]
    splits = splits_beside(graph, there, step.graph, plan)
    assigned = [Assignment(mesh, split) for mesh, split in zip(there, splits, strict=True)]
    notes = whole_notes(graph, splits)
    return make_plan(graph, plan.policy, plan.devices, assigned, notes, work=work), stages


def _check_used(graph: IRGraph, plan: Plan) -> None:
    """Raise PlanError where a mesh axis splits nothing of a forward, so that slots are idle."""
    used: dict[str, tuple[int, bool]] = {}
    for assignment in plan.assignments:
        mesh = assignment.mesh
        for axis, size, split in zip(mesh.axes, mesh.sizes, assignment.splits, strict=True):
            most, splits = used.get(axis, (1, False))
            used[axis] = max(most, size), splits or split is not None
    for axis, (size, splits) in used.items():
        if size > 1 and not splits:
            raise PlanError(
                f"nothing in the graph {graph.name!r} with the inputs "
                f"{', '.join(input_texts(graph))} can be split in {size} along the mesh axis "
                f"{axis!r}, as the training step is; give batches of {size} samples or more"
            )


def _in_time(
    training: TrainingPlan, microbatches: int, stages: Sequence[int], work: Sequence[int]
) -> TrainingPlan:
    """A step's plan in time with other microbatches. Raises PlanError where they are too few."""
    ranks = len(training.slots)
    options = Options(microbatches, training.schedule, training.chunks)
    return msgspec.structs.replace(
        training,
        microbatches=microbatches,
        stages=tuple(stages),
        work=stage_work(work, stages, options.schedule_on(ranks).stages),
    )


def _taken_apart(graph: IRGraph, step_graph: IRGraph, plan: Plan) -> tuple[int, ...]:
    """The fused products of the parameters whose products the step takes apart."""
    names = {
        name
        for position in plan.unfused
        for value_id in step_graph.nodes[position].inputs
        for name in step_graph.values[value_id].names
    }
    found = find_fusions(graph) if names else {}
    return tuple(
        position
        for position in found
        if any(names.intersection(graph.values[v].names) for v in graph.nodes[position].inputs)
    )


def _homes(step: Step, training: TrainingPlan) -> dict[Part, set[int]]:
    """The stages that read each stored value, or each part of a fused one."""
    homes: dict[Part, set[int]] = {}
    for node, stage in zip(step.graph.nodes, training.stages, strict=False):
        for value_id in node.inputs:
            for part in parts_of(step.graph.values[value_id]):
                homes.setdefault(part, set()).add(stage)
    return homes


def _stages(
    graph: IRGraph,
    step: Step,
    training: TrainingPlan,
    meshes: Mapping[int, Mesh],
    prepared: int,
) -> list[int]:
    """The stage of each node: the first on slots with its parameters, not before what it reads.

    Where the nodes behind the ``prepared`` ones are those of the step, each is where it is there.
    """
    homes = _homes(step, training)
    first_there = len(step.prepare)
    there = training.stages[first_there:]
    nodes = step.graph.nodes[first_there : len(training.stages)]
    same = node_keys(graph, graph.nodes[prepared:]) == node_keys(step.graph, nodes)
    wanted = [0] * prepared + (list(there) if same else [0] * (len(graph.nodes) - prepared))
    made: dict[int, int] = {}
    found = []
    for node, stage_there in zip(graph.nodes, wanted, strict=True):
        first = max((made.get(v, 0) for v in node.inputs), default=0)
        needed = _needed(graph, node, homes)
        stage = max(first, stage_there)
        if not _has_all(stage, needed, meshes):
            stage = _first_home(needed, first, meshes)
        made.update(dict.fromkeys(node.outputs, stage))
        found.append(stage)
    return found


def _needed(graph: IRGraph, node: IRNode, homes: Mapping[Part, set[int]]) -> list[set[int]]:
    """The stages that have each stored value that a node reads."""
    parts = (part for v in node.inputs for part in parts_of(graph.values[v])[:1])
    return [homes[part] for part in parts if part in homes]


def _first_home(needed: Sequence[set[int]], first: int, meshes: Mapping[int, Mesh]) -> int:
    """The first stage from one on whose slots have all that is needed.

    Where there is none, the first that is not before any of the values' own.
    """
    for stage in sorted(meshes):
        if stage >= first and _has_all(stage, needed, meshes):
            return stage
    return max([first, *map(min, needed)])


def _has_all(stage: int, needed: Sequence[set[int]], meshes: Mapping[int, Mesh]) -> bool:
    """Whether a stage's slots have all of the stored values that are needed."""
    return all(any(meshes[stage] == meshes[home] for home in homes) for homes in needed)
