"""Modules, source lines and names carried over from a graph to another that computes the same.

Comes in: a graph that knows where its nodes come from, and one that does not, which may compute
less, in another order, or the same thing twice. Goes out: the second with the first's modules and
lines where a node does the same. Two nodes do the same where they call one operator alike on values
that are the same, down to inputs and stored values, which are told by their names.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace

from shardwright.errors import CodegenError
from shardwright.ir import IRGraph, IRNode, IRValue
from shardwright.ir.structure import leaves


def with_origins_of(graph: IRGraph, known: IRGraph) -> IRGraph:
    """``graph`` with modules, lines and names of ``known``, and all names of its stored values.

    Nodes that ``known`` lacks stay as they are. Raises CodegenError where it has none of them.
    """
    seen: dict[Hashable, int] = {}
    there: dict[int, deque[IRNode]] = {}
    for key, node in _keys(known, seen):
        there.setdefault(key, deque()).append(node)
    pairs = [(node, _next(there.get(key))) for key, node in _keys(graph, seen)]
    if graph.nodes and not any(found for _, found in pairs):
        raise CodegenError(
            f"no node of the pipeline {graph.name!r} is one of the graph {known.name!r}; give the "
            "graph that the pipeline was built from"
        )
    nodes, names = [], dict[int, str]()
    for node, found in pairs:
        if found is not None:
            origins = zip(node.outputs, found.outputs, strict=True)
            names |= {value_id: known.values[origin].name for value_id, origin in origins}
            node = replace(node, scopes=found.scopes, source=found.source)
        nodes.append(node)
    return replace(graph, values=_values(graph, known, names), nodes=nodes)


def _next(found: deque[IRNode] | None) -> IRNode | None:
    """The nodes in order; the last one again where more do the same."""
    if found is None:
        return None
    return found.popleft() if len(found) > 1 else found[0]


def _values(graph: IRGraph, known: IRGraph, names: Mapping[int, str]) -> dict[int, IRValue]:
    """The values under the names they have in ``known``, with its roles and stored names."""
    stored = {name: value for value in known.stored() for name in value.names}
    found = {}
    for value_id, value in graph.values.items():
        origin = stored.get(value.name) if value.is_stored else None
        if origin is not None:
            found[value_id] = replace(
                value, role=origin.role, names=origin.names, persistent=origin.persistent
            )
        else:
            found[value_id] = replace(value, name=names.get(value_id, value.name))
    return found


def _keys(graph: IRGraph, seen: dict[Hashable, int]) -> Iterator[tuple[int, IRNode]]:
    """What each node does, as a number: equal for equal doings, in all graphs with one ``seen``."""
    assert graph.in_structure is not None
    values: dict[int, int] = {}

    def number(what: Hashable) -> int:
        return seen.setdefault(what, len(seen))

    for value_id, leaf in zip(graph.inputs, leaves(graph.in_structure), strict=True):
        values[value_id] = number(("input", leaf.name))
    for value in graph.stored():
        values[value.id] = number(("stored", value.names[:1], value.placements))
    for node in graph.nodes:
        inputs = tuple(values.get(value_id, -1) for value_id in node.inputs)
        key = number((node.op, repr(node.attrs), inputs))
        values |= {value_id: number((key, i)) for i, value_id in enumerate(node.outputs)}
        yield key, node
