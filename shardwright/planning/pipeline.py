"""The pipeline policy: N contiguous stages of balanced work and memory.

Comes in: a graph and the number of device slots. Goes out: a `Plan`. The cut is made in the flat
sequence of nodes, never in the tree of modules, so that skip connections, tied weights and values
used by several stages need no special case: whatever a stage lacks is sent to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardwright.errors import PlanError
from shardwright.ir import IRGraph
from shardwright.ir.repeats import crossing_bytes
from shardwright.planning.balance import Loads, cut, measure_loads, smallest_bound
from shardwright.planning.cost import node_work
from shardwright.planning.plan import Plan, Stage, TableSplit, fingerprint_graph
from shardwright.planning.tables import find_tables, split_tables

TABLE_SHARE = 0.1
"""A lookup table is worth cutting from this share of all stored bytes on."""
TABLE_GAIN = 1.1
"""...and where the largest load without the cut is at least this much larger."""

POLICIES = ("pipeline",)


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
    if devices > len(graph.nodes):
        raise PlanError(
            f"{devices} stages, but the graph {graph.name!r} has only {len(graph.nodes)} "
            f"nodes; ask for at most {len(graph.nodes)} devices"
        )
    loads = measure_loads(graph)
    tables, notes = _choose_tables(graph, loads, devices)
    cuts = cut(_without_tables(graph, loads, tables, devices), devices, crossing_bytes(graph))
    splits = tuple(TableSplit(position, devices) for position in tables)
    stages = _stages(graph, cuts, splits)
    return Plan(graph.name, fingerprint_graph(graph), policy, stages, splits, tuple(notes))


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
    share = -(-moved // devices)
    return replace(loads, single=single, extra=share)


def _stages(graph: IRGraph, cuts: Sequence[int], splits: Sequence[TableSplit]) -> tuple[Stage, ...]:
    """Stages over the positions of the graph in which the tables are cut."""
    count = len(cuts) - 1
    owned: list[list[int]] = [[] for _ in range(count)]
    parts_at = {split.node: split.parts for split in splits}
    position = 0
    for stage in range(count):
        for node in range(cuts[stage], cuts[stage + 1]):
            for part in range(parts_at.get(node, 0)):
                owned[part].append(position)
                position += 1
            owned[stage].append(position)
            position += 1
    final = split_tables(graph, splits)
    return tuple(_describe(final, f"d{i}", sorted(nodes)) for i, nodes in enumerate(owned))


def _describe(graph: IRGraph, device: str, positions: Sequence[int]) -> Stage:
    """A stage with its totals."""
    nodes = [graph.nodes[position] for position in positions]
    made = {value_id for node in nodes for value_id in node.outputs}
    read = {value_id for node in nodes for value_id in node.inputs} - made
    values = [graph.values[value_id] for value_id in read]
    return Stage(
        device,
        tuple(positions),
        work=sum(node_work(graph, node) for node in nodes),
        stored_bytes=sum(value.nbytes for value in values if value.is_stored),
        received_bytes=sum(value.nbytes for value in values if value.producer is not None),
    )
