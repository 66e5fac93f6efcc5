"""The pipeline policy: N contiguous stages of balanced work and memory.

The cut is made in the flat sequence of nodes, never in the tree of modules, so that skip
connections, tied weights and values used by several stages need no special case: whatever a stage
lacks is sent to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from shardwright.clusters import Mesh
from shardwright.errors import PlanError
from shardwright.ir import IRGraph
from shardwright.ir.repeats import crossing_bytes
from shardwright.ops.catalog import dimop_of
from shardwright.planning.balance import SLACK, Loads, cut, measure_loads, smallest_bound
from shardwright.planning.plan import Assignment, Split

TABLE_SHARE = 0.1
"""A lookup table is worth cutting from this share of all stored bytes on."""
TABLE_GAIN = 1.1
"""...and where the largest load without the cut is at least this much larger."""


def pipeline(graph: IRGraph, devices: Sequence[str]) -> tuple[list[Assignment], list[str]]:
    """The assignment of each node to one of ``devices``, and notes.

    The largest share of the work or of the stored bytes that any stage carries is as small as
    possible. Raises PlanError where there are more stages than nodes.
    """
    count = len(devices)
    loads = measure_loads(graph)
    tables, notes = _choose_tables(graph, loads, count)
    bounds = stage_bounds(graph, _without_tables(graph, loads, tables, count), count)
    assigned = [
        Assignment.on(device)
        for device, (start, stop) in zip(devices, pairwise(bounds), strict=True)
        for _ in range(start, stop)
    ]
    for position in tables:
        assigned[position] = cut_table(graph, position, devices)
    return assigned, notes


def check_stages(nodes: int, stages: int, graph: str, chunks: int = 1) -> None:
    """Raise PlanError where there are fewer nodes than stages, of which a rank has ``chunks``."""
    if type(stages) is not int or stages < 1:
        raise PlanError(f"a partition has 1 stage or more, found {stages!r}")
    if not nodes:
        raise PlanError(f"the graph {graph!r} has no nodes: there is nothing to plan")
    if stages > nodes:
        found = f"{stages} stages" if chunks == 1 else f"{stages} stages, {chunks} a pipeline rank"
        most = f"{nodes} stages" if chunks == 1 else f"{nodes // chunks} pipeline ranks"
        fix = f"ask for at most {most}" if nodes >= chunks else "take a policy of one stage a rank"
        raise PlanError(f"{found}, but the graph {graph!r} has only {nodes} nodes; {fix}")


def stage_bounds(
    graph: IRGraph, loads: Loads, stages: int, *, first: int = 0, slack: float = SLACK
) -> list[int]:
    """Where stages begin, and where the last one ends; ``first`` nodes are in none of them.

    Raises PlanError where there are fewer nodes than stages.
    """
    check_stages(len(graph.nodes) - first, stages, graph.name)
    bounds = cut(loads.after(first), stages, crossing_bytes(graph)[first:], slack)
    return [first + bound for bound in bounds]


def _choose_tables(graph: IRGraph, loads: Loads, devices: int) -> tuple[list[int], list[str]]:
    """Lookup tables to cut: those without which the stages balance clearly better."""
    tables = find_tables(graph, devices, TABLE_SHARE) if devices > 1 else []
    if not tables:
        return [], []
    whole = smallest_bound(loads, devices)
    split = smallest_bound(_without_tables(graph, loads, tables, devices), devices)
    if whole < split * TABLE_GAIN:
        return [], []
    names = ", ".join(graph.values[graph.nodes[position].inputs[0]].names[0] for position in tables)
    return tables, [
        f"cut by columns over all {devices} slots: {names} (the fullest stage then carries "
        f"{100 * split:.0f}% of the whole, otherwise {100 * whole:.0f}%)"
    ]


def _without_tables(graph: IRGraph, loads: Loads, tables: Sequence[int], devices: int) -> Loads:
    """Loads in which the tables' bytes lie evenly on all stages."""
    single, moved = list(loads.single), 0
    for position in tables:
        nbytes = graph.values[graph.nodes[position].inputs[0]].nbytes
        moved += nbytes
        single[position + 1 :] = [found - nbytes for found in single[position + 1 :]]
    return replace(loads, single=single, extra=-(-moved // devices))


# --- embedding tables -----------------------------------------------------------------------------
#
# An embedding is memory, not work: half of a small language model's bytes may lie in one table that
# does nothing but hand out rows. Left whole, the slot that has it is full before it has work to do.
# Cut by columns, each slot holds a part and looks up its columns of every row; the parts are joined
# where the table's rows are wanted. The result is the same to the last bit.


LOOKUP = "aten.embedding.default"


def find_tables(graph: IRGraph, parts: int, at_least: float) -> list[int]:
    """Positions of lookups whose table may be cut in ``parts`` and has the given share of bytes.

    A table that anything but one lookup reads (an output layer tied to it, say) stays whole.
    """
    total = sum(value.nbytes for value in graph.stored() if value.users) or 1
    found = []
    for position, node in enumerate(graph.nodes):
        if node.op == LOOKUP:
            table = graph.values[node.inputs[0]]
            alone = table.is_stored and len(table.users) == 1 and table.id not in graph.outputs
            large = table.nbytes >= at_least * total and table.shape[1] >= parts
            if alone and large and table.id not in graph.updates:
                found.append(position)
    return found


def cut_table(graph: IRGraph, position: int, devices: Sequence[str]) -> Assignment:
    """The assignment of the lookup at a position that gives each slot some columns."""
    bound = dimop_of(graph, graph.nodes[position])
    assert bound is not None
    mesh = Mesh(("table",), (len(devices),), tuple(devices))
    return Assignment(mesh, (Split(bound.identifier(0, 1)),))
