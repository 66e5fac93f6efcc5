"""A plan for another graph of a training step's model: its evaluation, on the same slots.

Comes in: the graph, the step's graph and the step's plan. Goes out: a plan in which what reads a
parameter runs where the step has the parameter, split as the step splits it. What always holds:
nodes stand in stages that never go back, so that what flows between them flows one way.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from shardwright.errors import PlanError
from shardwright.ir import IRGraph, IRNode
from shardwright.planning.beside_splits import splits_beside
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
    stages = _stages(apart, _homes(step, plan.training))
    there = [meshes[stage] for stage in stages]
    splits = splits_beside(apart, there, step.graph, plan)
    assigned = [Assignment(mesh, split) for mesh, split in zip(there, splits, strict=True)]
    made = make_plan(apart, plan.policy, plan.devices, assigned, whole_notes(apart, splits))
    return msgspec.structs.replace(
        made, fingerprint=fingerprint_graph(graph), unfused=unfused, stages=tuple(stages)
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


def _homes(step: Step, training: TrainingPlan) -> dict[str, int]:
    """The first stage that reads each stored value, by its names."""
    homes: dict[str, int] = {}
    for node, stage in zip(step.graph.nodes, training.stages, strict=False):
        for value_id in node.inputs:
            for name in step.graph.values[value_id].names:
                homes[name] = min(stage, homes.get(name, stage))
    return homes


def _stages(graph: IRGraph, homes: Mapping[str, int]) -> list[int]:
    """The stage of each node: where its parameters are, and not before what it reads."""
    made: dict[int, int] = {}
    found = []
    for node in graph.nodes:
        stage = max((made.get(v, 0) for v in node.inputs), default=0)
        stage = max([stage, *_needed(graph, node, homes)])
        made.update(dict.fromkeys(node.outputs, stage))
        found.append(stage)
    return found


def _needed(graph: IRGraph, node: IRNode, homes: Mapping[str, int]) -> list[int]:
    names = (name for v in node.inputs for name in graph.values[v].names[:1])
    return [homes[name] for name in names if name in homes]
