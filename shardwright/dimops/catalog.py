"""The catalog: one row an ATen operator at capture level, and what a node of a graph is by it.

In comes a node; out comes its `BoundDimop`, or None where nothing is known that would split it:
such a node is to be replicated, and `why_whole` says why. A row's rule depends on the call's
shapes and attributes only, so equal calls (the layers of a stack) are looked at once.

Where an operator comes from: `register` first, then the rows here, then discovery by running
(`infer`), whose answer is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from shardwright.dimops import (
    catalog_along,
    catalog_contraction,
    catalog_elementwise,
    catalog_factories,
    catalog_index,
    catalog_layers,
    catalog_losses,
    catalog_views,
)
from shardwright.dimops.bound import BoundDimop, bind
from shardwright.dimops.call import Call, Row
from shardwright.ir import IRGraph, IRNode

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
    found = find(call_of(graph, node))
    return found if isinstance(found, BoundDimop) else None


def find(call: Call) -> BoundDimop | str:
    row = ROWS.get(call.op)
    if row is None:
        return "no row"
    rule = row(call)
    return "none" if rule is None else bind(call, rule)
