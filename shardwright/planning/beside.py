"""A plan for another graph of a training step's model: its evaluation, on the same slots.

Comes in: the graph, the step's graph and the step's plan. Goes out: a plan in which what reads a
parameter runs where the step has the parameter, split as the step splits it. What always holds:
nodes stand in stages that never go back, so that what flows between them flows one way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from shardwright.errors import PlanError
from shardwright.ir import IRGraph, IRNode
from shardwright.layout import Mesh
from shardwright.planning.beside_splits import Part, parts_of, splits_beside
from shardwright.planning.fusions import find_fusions
from shardwright.planning.make import make_plan, step_of
from shardwright.planning.mesh import whole_notes
from shardwright.planning.plan import Assignment, Plan, TrainingPlan, fingerprint_graph
from shardwright.planning.step import Step
from shardwright.planning.unfuse import unfuse


def plan_beside(graph: IRGraph, step_graph: IRGraph, plan: Plan) -> Plan:
    """The plan of ``graph``, a forward, on the slots of a planned training step.

    Raises PlanError where ``plan`` is of no training step, or the graph cannot be split that way.
    """
    if plan.training is None:
        raise PlanError(f"the plan for {plan.graph!r} is of no training step")
    unfused = _taken_apart(graph, step_graph, plan)
    apart = unfuse(graph, unfused)
    meshes = {
        stage: plan.assignments[plan.nodes[i]].mesh for i, stage in enumerate(plan.training.stages)
    }
    step = step_of(step_graph, plan)
    stages = _stages(apart, _homes(step, plan.training), meshes)
    there = [meshes[stage] for stage in stages]
    splits = splits_beside(apart, there, step.graph, plan)
    assigned = [Assignment(mesh, split) for mesh, split in zip(there, splits, strict=True)]
    made = make_plan(apart, plan.policy, plan.devices, assigned, whole_notes(apart, splits))
    return msgspec.structs.replace(
        made,
        fingerprint=fingerprint_graph(graph),
        unfused=unfused,
        stages=tuple(stages),
        cluster=plan.cluster,
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
    graph: IRGraph, homes: Mapping[Part, set[int]], meshes: Mapping[int, Mesh]
) -> list[int]:
    """The stage of each node: the first on slots with its parameters, not before what it reads."""
    made: dict[int, int] = {}
    found = []
    for node in graph.nodes:
        stage = max((made.get(v, 0) for v in node.inputs), default=0)
        stage = _first_home(_needed(graph, node, homes), stage, meshes)
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
    places = [{meshes[stage] for stage in stages} for stages in needed]
    for stage in sorted(meshes):
        if stage >= first and all(meshes[stage] in slots for slots in places):
            return stage
    return max([first, *map(min, needed)])
