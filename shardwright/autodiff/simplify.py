"""Views that undo one another, taken out of a recorded backward.

Comes in: a graph under construction and what is asked of it. Goes out: the same graph without the
views that show what another value shows already: ``t(t(x))`` is ``x``, and so is a view of a view
that has the shape and strides of ``x``. What always holds: every result is bit for bit the same.

A linear layer's weight gradient, which torch gives as ``t(t(mm(t(dy), x)))``, becomes the product
``mm(t(dy), x)``, and a step that adds it up can be one ``addmm`` (see `accumulate`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwright.ir import IRGraph, IRNode, IRValue

_VIEWS = frozenset(
    {
        "aten.t.default",
        "aten.transpose.int",
        "aten.permute.default",
        "aten.numpy_T.default",
        "aten.view.default",
        "aten._unsafe_view.default",
        "aten.unsqueeze.default",
        "aten.squeeze.default",
        "aten.squeeze.dim",
        "aten.squeeze.dims",
        "aten.expand.default",
        "aten.alias.default",
    }
)
"""Views that begin where their input begins: shape and strides say which elements they show."""


def simplify(graph: IRGraph, results: Sequence[int | None]) -> list[int | None]:
    """Take views out of ``graph``; gives the results, some of them other values now."""
    same: dict[int, int] = {}
    producers: dict[int, IRNode] = {}
    kept: list[IRNode] = []
    for node in graph.nodes:
        node.inputs = [same.get(value_id, value_id) for value_id in node.inputs]
        found = _seen_before(graph, node, producers) if node.op in _VIEWS else None
        if found is None:
            kept.append(node)
            producers |= dict.fromkeys(node.outputs, node)
        else:
            same[node.outputs[0]] = found
    graph.nodes[:] = kept
    return [None if value_id is None else same.get(value_id, value_id) for value_id in results]


def _seen_before(graph: IRGraph, node: IRNode, producers: Mapping[int, IRNode]) -> int | None:
    """The value further up a chain of views that shows the same as what ``node`` makes."""
    made = _shown(graph.values[node.outputs[0]])
    before: IRNode | None = node
    while before is not None and before.op in _VIEWS:
        source = before.inputs[0]
        if _shown(graph.values[source]) == made:
            return source
        before = producers.get(source)
    return None


def _shown(value: IRValue) -> object:
    return value.shape, value.strides
