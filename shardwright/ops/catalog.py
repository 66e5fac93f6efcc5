"""The catalog: a row an operator, and what a node of a graph is by it.

A row's rule depends on a call's shapes and attributes only, so equal calls (the layers of a stack)
are bound once. An operator is looked up among those that `register` knows, then in the rows, then
by running it (`discover`).
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.ir import WITH_BACKWARD, IRGraph, IRNode
from shardwright.ir.operators import is_marker
from shardwright.ops.bound import BoundDimop, bind
from shardwright.ops.call import CatalogCall, OperatorRow
from shardwright.ops.discover import infer_rule
from shardwright.ops.register import bind_registered, registered
from shardwright.ops.rows import (
    contraction,
    elementwise,
    factories,
    indexing,
    layers,
    losses,
    reductions,
    views,
)
from shardwright.ops.rows.with_backward import with_backward

ROWS: Mapping[str, OperatorRow] = {
    **elementwise.ROWS,
    **contraction.ROWS,
    **views.ROWS,
    **reductions.ROWS,
    **layers.ROWS,
    **losses.ROWS,
    **indexing.ROWS,
    **factories.ROWS,
}
"""By the operator's name."""


def call_of(graph: IRGraph, node: IRNode) -> CatalogCall:
    """A node as a `CatalogCall`."""
    inputs = [graph.values[value_id] for value_id in node.inputs]
    return CatalogCall(
        node.op,
        tuple(value.shape for value in inputs),
        tuple(graph.values[value_id].shape for value_id in node.outputs),
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


def _look_up(call: CatalogCall) -> BoundDimop | str:
    if (operator := registered(call.op)) is not None:
        return bind_registered(operator, call)
    if call.op == WITH_BACKWARD:
        return bind(call, with_backward(call, dimop_of))
    row = ROWS.get(call.op)
    if row is not None and row.rule is not None:
        rule = row.rule(call)
        return bind(call, rule) if rule else f"{call.op}: {NOT_ALIKE}"
    inferred = infer_rule(call)
    if isinstance(inferred, str):
        return f"{call.op} has no row in the catalog, and no annotation was found: {inferred}"
    return bind(call, inferred, "inferred")


NOT_ALIKE = "this call draws random numbers, or its result's size depends on the values"
"""Why a row has no rule for a call."""
