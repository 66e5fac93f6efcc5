"""A plan put together from the assignment of each node, and back to the step that it is of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardwright.ir import IRGraph
from shardwright.planning.copies import copied
from shardwright.planning.loads import slot_loads
from shardwright.planning.mesh import DATA
from shardwright.planning.plan import (
    Assignment,
    Plan,
    fingerprint_graph,
    input_texts,
    label_of,
)
from shardwright.planning.step import Step, as_step
from shardwright.planning.unfuse import unfuse


def make_plan(
    graph: IRGraph,
    policy: str,
    devices: Sequence[str],
    assigned: Sequence[Assignment],
    notes: Sequence[str] = (),
    *,
    work: Sequence[int] | None = None,
    fingerprint: str | None = None,
) -> Plan:
    """The plan in which each node has the assignment at its place.

    ``work`` is that of each node, its forward's by default. ``fingerprint`` is that of the graph
    that the plan is for, where that is another.
    """
    numbers: dict[Assignment, int] = {}
    nodes = tuple(numbers.setdefault(assignment, len(numbers)) for assignment in assigned)
    loads = slot_loads(graph, devices, assigned, work)
    return Plan(
        graph.name,
        fingerprint or fingerprint_graph(graph),
        policy,
        tuple(devices),
        tuple(numbers),
        nodes,
        loads,
        tuple(notes),
        inputs=input_texts(graph),
        labels=tuple(map(label_of, graph.nodes)),
    )


def planned(graph: IRGraph, plan: Plan) -> IRGraph:
    """The graph whose nodes a model's plan assigns."""
    apart = unfuse(graph, plan.unfused)
    return copied(apart, plan.copies, plan.stages) if plan.copies else apart


def step_of(graph: IRGraph, plan: Plan) -> Step:
    """The step whose forward nodes a plan assigns."""
    assert plan.training is not None
    step = as_step(unfuse(graph, plan.unfused), plan.training.microbatches, shards_of(plan))
    if not plan.copies:
        return step
    again = copied(step.graph, plan.copies, plan.training.stages)
    return replace(step, graph=again, forward=step.forward + len(plan.copies))


def shards_of(plan: Plan) -> int:
    """In how many shards of the batch the slots of a plan's stages are, at the most."""
    meshes = (assignment.mesh for assignment in plan.assignments)
    return max(dict(zip(mesh.axes, mesh.sizes, strict=True)).get(DATA, 1) for mesh in meshes)
