"""What flows between the boxes of a picture, and between them and the graph's ends.

Comes in: a graph and its boxes. Goes out: ends and edges. What always holds: each pair of boxes has
one edge at most, with every distinct tensor that one makes and the other reads; what a box reads of
itself has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from shardwright.ir.drawing.facts import type_text
from shardwright.ir.drawing.picture import Box, Edge, End
from shardwright.ir.values import IRValue

if TYPE_CHECKING:
    from shardwright.ir.graph import IRGraph

ENDS = 8
"""Inputs, and outputs, that are drawn one by one; more are drawn as one."""


def ends_and_edges(
    graph: IRGraph, boxes: Sequence[Box]
) -> tuple[tuple[End, ...], tuple[Edge, ...]]:
    """The graph's inputs and outputs, and all that flows."""
    inputs, sources = _ends(graph, "in", graph.inputs, [graph.values[v].name for v in graph.inputs])
    outputs, targets = _ends(graph, "out", graph.outputs, graph.output_names)
    if graph.updates:
        new = list(graph.updates.values())
        outputs.append(_together("updates", f"{len(new)} updated", len(new), is_input=False))
        targets += [("updates", value_id) for value_id in new]
    sizes = _flows(graph, boxes, {v: name for name, v in sources}, targets)
    order = {box.name: i for i, box in enumerate(boxes)}
    parts = {box.name: box.part for box in boxes}
    edges = tuple(
        Edge(
            source,
            target,
            tuple(found.values()),
            crosses=source in parts and target in parts and parts[source] != parts[target],
            leads_back=source in order and target in order and order[source] > order[target],
        )
        for (source, target), found in sizes.items()
    )
    return (*inputs, *outputs), edges


def _flows(
    graph: IRGraph,
    boxes: Sequence[Box],
    sources: dict[int, str],
    targets: Sequence[tuple[str, int]],
) -> dict[tuple[str, str], dict[int, int]]:
    """Bytes of each value by the pair of names that it flows between."""
    box_of = {node_id: box.name for box in boxes for node_id in box.nodes}

    def source_of(value: IRValue) -> str | None:
        if value.producer is not None:
            return box_of[value.producer]
        return sources.get(value.id)

    found: dict[tuple[str, str], dict[int, int]] = {}
    for value_id, target in _reads(graph, box_of, targets):
        value = graph.values[value_id]
        source = source_of(value)
        if source is not None and source != target:
            found.setdefault((source, target), {})[value_id] = value.nbytes
    return found


def _reads(
    graph: IRGraph, box_of: dict[int, str], targets: Sequence[tuple[str, int]]
) -> Iterator[tuple[int, str]]:
    """Which value is read where, in the order of the graph."""
    for node in graph.nodes:
        for value_id in node.inputs:
            yield value_id, box_of[node.id]
    for name, value_id in targets:
        yield value_id, name


def _ends(
    graph: IRGraph, kind: str, value_ids: Sequence[int], names: Sequence[str]
) -> tuple[list[End], list[tuple[str, int]]]:
    """Inputs or outputs, one by one or together, and which values each has."""
    is_input = kind == "in"
    if len(value_ids) > ENDS:
        title = f"{len(value_ids)} {kind}puts"
        end = _together(kind, title, len(value_ids), is_input=is_input)
        return [end], [(end.name, value_id) for value_id in value_ids]
    found = [
        End(f"{kind}{i}", name, type_text(graph.values[value_id]), is_input)
        for i, (name, value_id) in enumerate(zip(names, value_ids, strict=True))
    ]
    return found, [(end.name, v) for end, v in zip(found, value_ids, strict=True)]


def _together(name: str, title: str, count: int, *, is_input: bool) -> End:
    return End(name, title, f"{count} tensor{'s' * (count != 1)}", is_input)
