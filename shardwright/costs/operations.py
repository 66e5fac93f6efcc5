"""What is known of operators by name: their arithmetic, and what moves memory or does not.

`FORMULAS` has the operators whose time is in multiplying and adding; `FUNCTIONS` those that do more
for an element than to move it; `FREE` those that return what they were given, seen otherwise. All
others take the time that their bytes take. What planners count and what the roofline prices is read
from these tables alone; graphs of training hold the operators of backwards too. What a user's
operator does is read from its annotation.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from shardwright.ir import IRGraph, IRNode, IRValue
from shardwright.ir.dropout import DROPOUT
from shardwright.ir.operators import is_built_in, is_marker
from shardwright.ops.annotation import TensorDims
from shardwright.ops.catalog import dimop_of

Values = Sequence[IRValue]
Formula = Callable[[Values, Values], int]
"""Floating-point operations of a call from its inputs and its outputs."""


def _linear(inputs: Values, outputs: Values) -> int:
    return 2 * outputs[0].numel * inputs[1].shape[-1]


def _matmul(inputs: Values, outputs: Values) -> int:
    return 2 * outputs[0].numel * inputs[0].shape[-1]


def _matmul_and_add(inputs: Values, outputs: Values) -> int:
    return 2 * outputs[0].numel * inputs[1].shape[-1]


def _convolution(inputs: Values, outputs: Values) -> int:
    return 2 * outputs[0].numel * math.prod(inputs[1].shape[1:])


def _transposed_convolution(inputs: Values, outputs: Values) -> int:
    return 2 * inputs[0].numel * math.prod(inputs[1].shape[1:])


def _attention(inputs: Values, outputs: Values) -> int:
    *batch, queries, width = inputs[0].shape
    keys, value_width = inputs[1].shape[-2], inputs[2].shape[-1]
    return 2 * math.prod(batch) * queries * keys * (width + value_width)


def _convolution_backward(inputs: Values, outputs: Values) -> int:
    """A convolution as large as the forward for each gradient but that of the bias."""
    gradients = sum(len(value.shape) > 1 for value in outputs)
    return gradients * 2 * inputs[0].numel * math.prod(inputs[2].shape[1:])


def _attention_backward(inputs: Values, outputs: Values) -> int:
    """As much as the forward for each of three gradients; ``inputs`` begin with the output's."""
    return 3 * _attention(inputs[1:], outputs)


FORMULAS: dict[str, Formula] = {
    "aten.linear.default": _linear,
    "aten.matmul.default": _matmul,
    "aten.mm.default": _matmul,
    "aten.bmm.default": _matmul,
    "aten.mv.default": _matmul,
    "aten.dot.default": _matmul,
    "aten.addmm.default": _matmul_and_add,
    "aten.baddbmm.default": _matmul_and_add,
    "aten.conv1d.default": _convolution,
    "aten.conv1d.padding": _convolution,
    "aten.conv2d.default": _convolution,
    "aten.conv2d.padding": _convolution,
    "aten.conv3d.default": _convolution,
    "aten.conv3d.padding": _convolution,
    "aten.convolution.default": _convolution,
    "aten.conv_transpose1d.default": _transposed_convolution,
    "aten.conv_transpose2d.input": _transposed_convolution,
    "aten.conv_transpose3d.input": _transposed_convolution,
    "aten.scaled_dot_product_attention.default": _attention,
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _attention,
    "aten._scaled_dot_product_flash_attention.default": _attention,
    "aten._scaled_dot_product_efficient_attention.default": _attention,
    "aten.convolution_backward.default": _convolution_backward,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": _attention_backward,
    "aten._scaled_dot_product_flash_attention_backward.default": _attention_backward,
    "aten._scaled_dot_product_efficient_attention_backward.default": _attention_backward,
}

FREE = frozenset(
    f"aten.{name}"
    for name in (
        "view.default",
        "reshape.default",
        "permute.default",
        "transpose.int",
        "t.default",
        "unsqueeze.default",
        "squeeze.dim",
        "squeeze.default",
        "expand.default",
        "slice.Tensor",
        "select.int",
        "split.Tensor",
        "split_with_sizes.default",
        "chunk.default",
        "unbind.int",
        "flatten.using_ints",
        "unflatten.int",
        "detach.default",
        "alias.default",
    )
)
"""Views: they move nothing."""

LOOKUP = "aten.embedding.default"
"""Rows of a table: it reads the rows that it writes, and its gradient is as large as the table."""
LOOKUP_BACKWARD = "aten.embedding_dense_backward.default"
LOOKUPS = frozenset(
    f"aten.{name}.default" for name in ("embedding", "gather", "index_select", "take_along_dim")
) | {"aten.index.Tensor"}
"""They read no more of their first input than they write."""
FILLS = frozenset(
    f"aten.{name}.default"
    for name in (
        *("zeros_like", "ones_like", "full_like", "empty_like"),
        *("new_zeros", "new_ones", "new_full", "new_empty"),
    )
)
"""They read of their inputs nothing but the shape."""
INTO_ZEROS = frozenset(("aten.slice_backward.default", "aten.select_backward.default"))
"""They fill with zeros what they make, and write what they are given into it."""
EFFICIENCY: Mapping[str, float] = {
    op: share
    for share, formulas in (
        (0.45, (_attention, _attention_backward)),
        (0.75, (_convolution, _transposed_convolution, _convolution_backward)),
    )
    for op, formula in FORMULAS.items()
    if formula in formulas
}
"""What share of the rate of large products others reach; from times of a CPU core."""
TABLE_PASSES = 7
"""How often the backward of a lookup moves the table's: zeros, rows added, all added to before."""
ADD_PASSES = 3
"""How often an addition of two tensors of a size moves the bytes of one."""
UPDATE_PASSES = 3
"""How often an update moves the bytes of a parameter: it and its gradient are read, it is written.
"""
STATE_PASSES = 2
"""The same of the optimizer's state."""


class Function(NamedTuple):
    """A function whose arithmetic takes a CPU longer than its bytes do.

    ``forward`` and ``backward`` are operations for each element of the first input; the names are
    of what a graph may call it by, and its backward.
    """

    names: tuple[str, ...]
    forward: int
    backward_names: tuple[str, ...]
    backward: int


FUNCTIONS = (
    Function(("gelu.default",), 75, ("gelu_backward.default",), 175),
    Function(("silu.default",), 85, ("silu_backward.default",), 125),
    Function(
        ("layer_norm.default", "native_layer_norm.default"),
        80,
        ("native_layer_norm_backward.default",),
        160,
    ),
    Function(
        ("rms_norm.default", "_fused_rms_norm.default"),
        80,
        ("_fused_rms_norm_backward.default",),
        160,
    ),
    Function(
        ("softmax.int", "_softmax.default", "_safe_softmax.default"),
        115,
        ("_softmax_backward_data.default",),
        115,
    ),
    Function(
        ("log_softmax.int", "_log_softmax.default"),
        115,
        ("_log_softmax_backward_data.default",),
        115,
    ),
    Function(("cross_entropy_loss.default",), 160, (), 160),
)
"""From times of a CPU core that does some 120 operations in a nanosecond."""
DRAWING = 2000
"""Operations for each element of a dropout that counts (`ir.dropout`): its random number."""

ELEMENTS: Mapping[str, int] = {
    f"aten.{name}": row.forward + row.backward for row in FUNCTIONS for name in row.names
} | {DROPOUT: 2 * DRAWING}
"""Operations for each element of the first input, forward and backward."""
ELEMENTS_OF_CALL: Mapping[str, int] = {
    f"aten.{name}": operations
    for row in FUNCTIONS
    for names, operations in ((row.names, row.forward), (row.backward_names, row.backward))
    for name in names
} | {DROPOUT: DRAWING}
"""Operations for each element of the first input of one call."""

WINDOWS: Mapping[str, int] = {
    "aten.max_pool2d.default": 550,
    "aten.max_pool2d_with_indices.default": 550,
}
"""Operations for each element of each window, of operators that a CPU does one by one."""


def arithmetic(graph: IRGraph, node: IRNode) -> int | None:
    """The multiplications and additions of a contraction; None for every other operator."""
    inputs = [graph.values[value_id] for value_id in node.inputs]
    if node.op == "aten.einsum.default":
        return _einsum(node.attrs["equation"], inputs)
    if not is_built_in(node.op) and not is_marker(node.op):
        return _annotated(graph, node)
    formula = FORMULAS.get(node.op)
    return formula and formula(inputs, [graph.values[value_id] for value_id in node.outputs])


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


def _einsum(equation: str, inputs: Values) -> int:
    """Two operations a point of the space that all indices span.

    Dimensions that an ellipsis stands for are known by their number from behind.
    """
    terms = equation.replace(" ", "").split("->")[0].split(",")
    sizes: dict[str | int, int] = {}
    for term, value in zip(terms, inputs, strict=True):
        head, _, tail = term.partition("...")
        rest = len(value.shape) - len(head) - len(tail)
        names = [*head, *range(-rest, 0), *tail]
        for name, size in zip(names, value.shape, strict=True):
            sizes[name] = max(size, sizes.get(name, 1))
    return 2 * math.prod(sizes.values())
