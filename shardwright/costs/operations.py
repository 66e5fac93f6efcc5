"""What is known of operators by name: their arithmetic, and what moves memory or does not.

Read from the operators' rows (`ops.call.OperatorRow`); graphs of training hold the operators of
backwards too. Operators without a row take the time that their bytes take; what a user's operator
does is read from its annotation.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from shardwright.ir import IRGraph, IRNode
from shardwright.ir.operators import is_built_in, is_marker
from shardwright.ops.annotation import TensorDims
from shardwright.ops.catalog import ROWS, call_of, dimop_of

FORMULAS = frozenset(op for op, row in ROWS.items() if row.flops is not None)
"""Operators whose time is in multiplying and adding."""
FREE = frozenset(op for op, row in ROWS.items() if row.free)
"""Views: they move nothing."""
LOOKUP = "aten.embedding.default"
"""Rows of a table: it reads the rows that it writes, and its gradient is as large as the table."""
LOOKUP_BACKWARD = "aten.embedding_dense_backward.default"
LOOKUPS = frozenset(op for op, row in ROWS.items() if row.reads == "rows")
"""They read no more of their first input than they write."""
FILLS = frozenset(op for op, row in ROWS.items() if row.reads == "shape")
"""They read of their inputs nothing but the shape."""
INTO_ZEROS = frozenset(("aten.slice_backward.default", "aten.select_backward.default"))
"""They fill with zeros what they make, and write what they are given into it."""
EFFICIENCY = {op: row.efficiency for op, row in ROWS.items() if row.efficiency != 1}
"""What share of the rate of large products others reach."""
TABLE_PASSES = 7
"""How often the backward of a lookup moves the table's: zeros, rows added, all added to before."""
ADD_PASSES = 3
"""How often an addition of two tensors of a size moves the bytes of one."""
UPDATE_PASSES = 3
"""How often an update moves the bytes of a parameter: it and its gradient are read, it is written.
"""
STATE_PASSES = 2
"""The same of the optimizer's state."""


ELEMENTS_OF_CALL = {op: row.elements for op, row in ROWS.items() if row.elements}
"""Operations for each element of the first input of one call, from times of a CPU core that does
some 120 operations in a nanosecond."""
ELEMENTS = {
    op: row.elements + row.backward_elements for op, row in ROWS.items() if row.backward_elements
}
"""The same, forward and backward."""

WINDOWS: Mapping[str, int] = {
    "aten.max_pool2d.default": 550,
    "aten.max_pool2d_with_indices.default": 550,
}
"""Operations for each element of each window, of operators that a CPU does one by one."""


def arithmetic(graph: IRGraph, node: IRNode) -> int | None:
    """The multiplications and additions of a contraction; None for every other operator."""
    if not is_built_in(node.op) and not is_marker(node.op):
        return _annotated(graph, node)
    row = ROWS.get(node.op)
    return row.flops(call_of(graph, node)) if row is not None and row.flops else None


def element_operations(graph: IRGraph, node: IRNode) -> int:
    """What a CPU does on single elements in one call, where that takes longer than their bytes."""
    if node.op in WINDOWS:
        window: int = math.prod(node.attrs["kernel_size"])
        return WINDOWS[node.op] * graph.values[node.outputs[0]].numel * window
    if node.op not in ELEMENTS_OF_CALL:
        return 0
    return ELEMENTS_OF_CALL[node.op] * graph.values[node.inputs[0]].numel


def _annotated(graph: IRGraph, node: IRNode) -> int | None:
    """Those of a user's operator whose annotation sums over what several inputs have.

    As of a contraction: two operations a point of the space that the outputs' dimensions and those
    that are summed over span. A dimension of one input alone says which part of it is read.
    """
    bound = dimop_of(graph, node)
    if bound is None:
        return None
    annotation = bound.inference.annotation
    given = Counter(name for tensor in annotation.inputs for name in _identifiers(tensor))
    summed = {name for name, kind in annotation.reductions().items() if kind == "+"}
    summed &= {name for name, times in given.items() if times > 1}
    made = {name for tensor in annotation.outputs for name in _identifiers(tensor)}
    return 2 * math.prod(bound.length(name) for name in summed | made) if summed else None


def _identifiers(tensor: TensorDims) -> set[str]:
    return {factor.name for factor in tensor.factors() if isinstance(factor.name, str)}
