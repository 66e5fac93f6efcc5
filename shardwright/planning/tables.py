"""Lookup tables cut by columns over all slots.

An embedding is memory, not work: half of a small language model's bytes may lie in one table that
does nothing but hand out rows. Left whole, the slot that has it is full before it has work to do.
Cut by columns, each slot holds a part and looks up its columns of every row; the parts are joined
where the table's rows are wanted. The result is the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwright.errors import PlanError
from shardwright.ir import Builder, Input, IRGraph, IRNode, IRValue
from shardwright.planning.plan import TableSplit

LOOKUP = "aten.embedding.default"


def find_tables(graph: IRGraph, parts: int, at_least: float) -> list[int]:
    """Positions of lookups whose table may be cut in ``parts`` and has the given share of bytes.

    A table that anything but one lookup reads (an output layer tied to it, say) stays whole.
    """
    total = sum(value.nbytes for value in graph.stored() if value.users) or 1
    found = []
    for position, node in enumerate(graph.nodes):
        if node.op == LOOKUP and node.inputs:
            table = graph.values[node.inputs[0]]
            alone = table.is_stored and len(table.users) == 1 and table.id not in graph.outputs
            large = table.nbytes >= at_least * total and table.shape[1] >= parts
            if alone and large and table.id not in graph.updates:
                found.append(position)
    return found


def split_tables(graph: IRGraph, splits: Sequence[TableSplit]) -> IRGraph:
    """The same graph with the lookups at these positions cut; others keep their order.

    A lookup at one position becomes ``parts`` lookups, in the order of their columns, and a
    concatenation. Raises PlanError where a position is no lookup of a stored table.
    """
    if not splits:
        return graph
    parts_at = {split.node: split.parts for split in splits}
    cut = {_table_of(graph, position).id for position in parts_at}
    builder = Builder(graph.name)
    mapping: dict[int, int] = {}
    for value_id in graph.inputs:
        mapping[value_id] = builder.copy_value(graph, graph.values[value_id]).id
    for value in graph.stored():
        if value.id not in cut:
            mapping[value.id] = builder.copy_value(graph, value).id
    for position, node in enumerate(graph.nodes):
        if position in parts_at:
            _split_lookup(graph, builder, node, parts_at[position], mapping)
        else:
            builder.copy_node(graph, node, mapping)
    return builder.finish(
        [mapping[value_id] for value_id in graph.outputs],
        in_structure=graph.in_structure,
        out_structure=graph.out_structure,
        updates={mapping[old]: mapping[new] for old, new in graph.updates.items()},
    )


def _table_of(graph: IRGraph, position: int) -> IRValue:
    node = graph.nodes[position] if position < len(graph.nodes) else None
    if node is None or node.op != LOOKUP or not graph.values[node.inputs[0]].is_stored:
        raise PlanError(f"the plan cuts a lookup table at node {position}, where none is")
    return graph.values[node.inputs[0]]


def _split_lookup(
    graph: IRGraph, builder: Builder, node: IRNode, parts: int, mapping: dict[int, int]
) -> None:
    table, result = graph.values[node.inputs[0]], graph.values[node.outputs[0]]
    indices = mapping[node.inputs[1]]
    pieces = []
    for start, stop in even_ranges(table.shape[1], parts):
        part = _columns(graph, builder, table, start, stop)
        spec = builder.value(
            f"{result.name}.{start}", (*result.shape[:-1], stop - start), result.dtype
        )
        pieces.append(
            builder.emit(
                node.op,
                [part, indices],
                node.attrs,
                outputs=[spec],
                scopes=node.scopes,
                source=node.source,
            )
        )
    joined = builder.value(result.name, result.shape, result.dtype, device=result.device)
    with_inputs = {"tensors": [Input(i) for i in range(parts)], "dim": len(result.shape) - 1}
    builder.emit(
        "aten.cat.default",
        pieces,
        with_inputs,
        outputs=[joined],
        scopes=node.scopes,
        source=node.source,
    )
    mapping[result.id] = joined.id


def _columns(graph: IRGraph, builder: Builder, table: IRValue, start: int, stop: int) -> IRValue:
    """Columns start..stop-1 of a stored table, as a stored value of its own."""
    rows, columns = table.placements or tuple((0, size) for size in table.shape)
    contents = graph.tensors.get(table.id)
    if contents is None:
        contents = torch.empty(table.shape, dtype=torch.float32, device="meta")
    return builder.stored(
        table.role,
        f"{table.name}.{start}",
        contents[:, start:stop],
        names=table.names,
        placements=(rows, (columns[0] + start, columns[0] + stop)),
    )


def even_ranges(size: int, parts: int) -> list[tuple[int, int]]:
    """0..size cut in ``parts`` ranges as even as can be, larger ones first."""
    small, larger = divmod(size, parts)
    ranges, start = [], 0
    for i in range(parts):
        stop = start + small + (i < larger)
        ranges.append((start, stop))
        start = stop
    return ranges
