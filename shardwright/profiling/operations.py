"""What is known of operators by name: their arithmetic, and what moves memory or does not.

`FORMULAS` has the operators whose time is in multiplying and adding; `ELEMENTS` those that do more
for an element than to move it; `FREE` those that return what they were given, seen otherwise. All
others take the time that their bytes take. What planners count and what the roofline prices is read
from these tables alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from shardwright.ir import IRGraph, IRNode, IRValue

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

LOOKUP = "aten.embedding.default"
"""Rows of a table: it reads the rows that it writes, and its gradient is as large as the table."""
TABLE_PASSES = 7
"""How often the backward of a lookup moves the table's: zeros, rows added, all added to before."""
UPDATE_PASSES = 7
"""How often an update moves a parameter's bytes: it, its gradient and two states, three written."""
ELEMENTS: Mapping[str, int] = {
    "aten.gelu.default": 250,
    "aten.silu.default": 210,
    "aten.layer_norm.default": 240,
    "aten.rms_norm.default": 240,
    "aten.softmax.int": 230,
    "aten.log_softmax.int": 230,
    "aten.cross_entropy_loss.default": 320,
}
"""Operations for each element of the first input, forward and backward, of functions that take more
time than their bytes do; from times of a CPU core that does some 120 in a nanosecond."""


def arithmetic(graph: IRGraph, node: IRNode) -> int | None:
    """The multiplications and additions of a contraction; None for every other operator."""
    inputs = [graph.values[value_id] for value_id in node.inputs]
    if node.op == "aten.einsum.default":
        return _einsum(node.attrs["equation"], inputs)
    formula = FORMULAS.get(node.op)
    return formula and formula(inputs, [graph.values[value_id] for value_id in node.outputs])


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
