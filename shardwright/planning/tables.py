"""Lookup tables cut by columns over all slots.

An embedding is memory, not work: half of a small language model's bytes may lie in one table that
does nothing but hand out rows. Left whole, the slot that has it is full before it has work to do.
Cut by columns, each slot holds a part and looks up its columns of every row; the parts are joined
where the table's rows are wanted. The result is the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.clusters import Mesh
from shardwright.ir import IRGraph
from shardwright.ops.catalog import dimop_of
from shardwright.planning.plan import Assignment, Split

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
