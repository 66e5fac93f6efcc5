"""What a node costs, estimated from its shapes alone.

`work` is in floating-point operations, a multiply and an add being two. Operators with a formula
stand in `FORMULAS`; every other one is counted as the bytes it reads and writes, each worth
`WORK_PER_BYTE` operations, since memory, not arithmetic, is what it takes time for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from shardwright.ir import IRGraph, IRNode, IRValue

WORK_PER_BYTE = 4
"""Operations a core does in the time in which it moves a byte; a CPU core does 3 to 10."""

Values = Sequence[IRValue]
Formula = Callable[[Values, Values], int]


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


def node_work(graph: IRGraph, node: IRNode) -> int:
    """Estimated floating-point operations of a node, memory traffic counted as such."""
    inputs = [graph.values[value_id] for value_id in node.inputs]
    outputs = [graph.values[value_id] for value_id in node.outputs]
    if node.op in FREE:
        return 0
    if node.op in FORMULAS:
        return FORMULAS[node.op](inputs, outputs)
    if node.op == "aten.einsum.default":
        return _einsum(node.attrs["equation"], inputs)
    if node.op == "aten.embedding.default":
        return 2 * WORK_PER_BYTE * outputs[0].nbytes
    return WORK_PER_BYTE * sum(value.nbytes for value in (*inputs, *outputs))


def _einsum(equation: str, inputs: Values) -> int:
    """Two operations a point of the space that all indices span."""
    terms = equation.replace(" ", "").split("->")[0].split(",")
    sizes: dict[str, int] = {}
    for term, value in zip(terms, inputs, strict=True):
        letters = [*term.replace("...", "")]
        shape = value.shape[-len(letters) :] if term.startswith("...") else value.shape
        for letter, size in zip(letters, shape, strict=False):
            sizes[letter] = max(size, sizes.get(letter, 1))
    return 2 * math.prod(sizes.values())
