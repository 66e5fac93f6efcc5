"""The catalog: one row an ATen operator at capture level, and what a node of a graph is by it.

In comes a node; out comes its `BoundDimop`, or None where nothing is known that would split it:
such a node is to be replicated, and `why_whole` says why. A row's rule depends on the call's
shapes and attributes only, so equal calls (the layers of a stack) are looked at once.

Where an operator comes from: `register` first, then the rows here, then discovery by running
(`infer`), whose answer is kept.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.ir import WITH_BACKWARD, IRGraph, IRNode
from shardwright.ir.operators import is_marker
from shardwright.ops import (
    catalog_along,
    catalog_contraction,
    catalog_elementwise,
    catalog_factories,
    catalog_index,
    catalog_layers,
    catalog_losses,
    catalog_views,
)
from shardwright.ops.bound import BoundDimop, bind
from shardwright.ops.call import Call, Row
from shardwright.ops.catalog_backward import with_backward
from shardwright.ops.infer import infer_rule
from shardwright.ops.register import bind_registered, registered

ROWS: Mapping[str, Row] = {
    **catalog_elementwise.ROWS,
    **catalog_contraction.ROWS,
    **catalog_views.ROWS,
    **catalog_along.ROWS,
    **catalog_layers.ROWS,
    **catalog_losses.ROWS,
    **catalog_index.ROWS,
    **catalog_factories.ROWS,
}
"""Operator name to row."""


def call_of(graph: IRGraph, node: IRNode) -> Call:
    """A node as a `Call`."""
    inputs = [graph.values[value_id] for value_id in node.inputs]
    outputs = [graph.values[value_id] for value_id in node.outputs]
    return Call(
        node.op,
        tuple(value.shape for value in inputs),
        tuple(value.shape for value in outputs),
        node.attrs,
        tuple(value.dtype for value in inputs),
    )


def dimop_of(graph: IRGraph, node: IRNode) -> BoundDimop | None:
    """What is known of splitting a node; None where it is to be replicated (see `why_whole`)."""
    found = _find(graph, node)
    return found if isinstance(found, BoundDimop) else None


def why_whole(graph: IRGraph, node: IRNode) -> str | None:
    """Why a node can only be replicated; None where it can be split."""
    found = _find(graph, node)
    if isinstance(found, str):
        return found
    if found.identifiers:
        return None
    return f"{found}: no dimension of it may be split"


_known: dict[tuple[object, ...], BoundDimop | str] = {}
"""What was found, by what a rule depends on."""


def _find(graph: IRGraph, node: IRNode) -> BoundDimop | str:
    if is_marker(node.op):
        return f"{node.op} is a marker, which lowering expands"
    call = call_of(graph, node)
    key = (call.op, call.inputs, call.outputs, call.dtypes, repr(call.attrs), registered(call.op))
    if key not in _known:
        _known[key] = _look_up(call)
    return _known[key]


def _look_up(call: Call) -> BoundDimop | str:
    if (operator := registered(call.op)) is not None:
        return bind_registered(operator, call)
    if call.op == WITH_BACKWARD:
        return bind(call, with_backward(call, dimop_of))
    if (row := ROWS.get(call.op)) is not None:
        rule = row(call)
        return bind(call, rule) if rule else f"{call.op}: {NOT_ALIKE}"
    inferred = infer_rule(call)
    if isinstance(inferred, str):
        return f"{call.op} has no row in the catalog, and no annotation was found: {inferred}"
    return bind(call, inferred, "inferred")


NOT_ALIKE = "this call draws random numbers, or its result's size depends on the values"
"""Why a row has no rule for a call."""
