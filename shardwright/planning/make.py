"""`plan`: from a graph and a number of slots to a Plan, by a policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardwright.errors import PlanError
from shardwright.ir import IRGraph
from shardwright.planning.loads import slot_loads
from shardwright.planning.pipeline import pipeline
from shardwright.planning.plan import Assignment, Plan, fingerprint_graph

Assigner = Callable[[IRGraph, Sequence[str]], tuple[list[Assignment], list[str]]]
"""From a graph and slots to the assignment of each node, and notes."""

POLICIES: dict[str, Assigner] = {"pipeline": pipeline}


def plan(graph: IRGraph, devices: int, policy: str = "pipeline") -> Plan:
    """Which of ``devices`` slots runs which node.

    ``policy="pipeline"`` cuts the graph in that many contiguous stages, so that the largest share
    of the work or of the stored bytes that any stage carries is as small as possible.
    Raises PlanError where that cannot be done.
    """
    if policy not in POLICIES:
        raise PlanError(f"unknown policy {policy!r}; known are {', '.join(POLICIES)}")
    if type(devices) is not int or devices < 1:
        raise PlanError(f"devices must be a number of slots from 1 up, found {devices!r}")
    names = tuple(f"d{i}" for i in range(devices))
    assigned, notes = POLICIES[policy](graph, names)
    return make_plan(graph, policy, names, assigned, notes)


def make_plan(
    graph: IRGraph,
    policy: str,
    devices: Sequence[str],
    assigned: Sequence[Assignment],
    notes: Sequence[str] = (),
) -> Plan:
    """The plan in which each node has the assignment at its place."""
    numbers: dict[Assignment, int] = {}
    nodes = tuple(numbers.setdefault(assignment, len(numbers)) for assignment in assigned)
    loads = slot_loads(graph, devices, assigned)
    return Plan(
        graph.name,
        fingerprint_graph(graph),
        policy,
        tuple(devices),
        tuple(numbers),
        nodes,
        loads,
        tuple(notes),
    )
