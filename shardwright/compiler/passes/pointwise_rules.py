"""Operators of torch as instructions of a pointwise kernel: one row each, and which may fuse.

The steps are those of torch's own kernel, so that the same numbers are rounded. Nodes of one
`Family` may fuse: within it every step rounds as it did. An inner value is f32 where a kernel
computes in f32 and f64 where in f64; integers only enter where they become floats, or are compared
with a small number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from shardwright.compiler.passes.rewriter import Tensor, arguments
from shardwright.ir import IRGraph, IRNode
from shardwright.kernels.chains import ChainInput, ChainInstruction, ChainOperand, ChainResult

Arguments = Mapping[str, Any]


class ChainWriter:
    """Appends instructions; ``operand`` gives the operand that stands for a value."""

    def __init__(self, operand: Callable[[int], ChainOperand]) -> None:
        self.instructions: list[ChainInstruction] = []
        self._operand = operand

    def __call__(self, op: str, *operands: Any) -> ChainOperand:
        """Append an instruction on tensors, numbers and earlier results; gives its result."""
        self.instructions.append(ChainInstruction(op, tuple(map(self._of, operands))))
        return ChainResult(len(self.instructions) - 1)

    def _of(self, item: Any) -> ChainOperand:
        if isinstance(item, Tensor):
            return self._operand(int(item))
        return item if isinstance(item, (ChainInput, ChainResult)) else float(item)


Row = Callable[[ChainWriter, Arguments], ChainOperand | None]


def _plain(op: str, *names: str) -> Row:
    """One instruction on the arguments of these names."""

    def write(w: ChainWriter, given: Arguments) -> ChainOperand | None:
        return w(op, *(given[name] for name in names))

    return write


def _scaled(op: str, first: str, second: str) -> Row:
    """``first op alpha * second``."""

    def write(w: ChainWriter, given: Arguments) -> ChainOperand | None:
        alpha = given["alpha"]
        other = given[second]
        return w(op, given[first], other if alpha == 1 else w("mul", other, alpha))

    return write


def _gelu(backward: bool) -> Row:
    names = ("grad_output", "self") if backward else ("self",)

    def write(w: ChainWriter, given: Arguments) -> ChainOperand | None:
        op = "gelu_tanh" if given["approximate"] == "tanh" else "gelu"
        return w(f"{op}_bwd" if backward else op, *(given[name] for name in names))

    return write


def _relu_backward(w: ChainWriter, given: Arguments) -> ChainOperand | None:
    if isinstance(given["threshold"], Tensor) or given["threshold"] != 0:
        return None
    return w("relu_bwd", given["grad_output"], given["self"])


def _power(w: ChainWriter, given: Arguments) -> ChainOperand | None:
    """As torch does whole and half powers."""
    x, exponent = given["self"], given["exponent"]
    if isinstance(exponent, Tensor) or exponent not in _POWERS:
        return w("pow", x, exponent)
    return _POWERS[exponent](w, x)


_POWERS: Mapping[float, Callable[[ChainWriter, Any], ChainOperand]] = {
    2: lambda w, x: w("square", x),
    3: lambda w, x: w("mul", w("square", x), x),
    0.5: lambda w, x: w("sqrt", x),
    -0.5: lambda w, x: w("rsqrt", x),
    -1: lambda w, x: w("reciprocal", x),
    -2: lambda w, x: w("reciprocal", w("square", x)),
}


def _divide(w: ChainWriter, given: Arguments) -> ChainOperand | None:
    return w("div", given["self"], given["other"])


def _clamp(low: str | None, high: str | None) -> Row:
    def write(w: ChainWriter, given: Arguments) -> ChainOperand | None:
        made = given["self"]
        if low and given[low] is not None:
            made = w("max", made, given[low])
        if high and given[high] is not None:
            made = w("min", made, given[high])
        return made if isinstance(made, ChainResult) else None

    return write


def _masked_fill(w: ChainWriter, given: Arguments) -> ChainOperand | None:
    return w("where", given["mask"], given["value"], given["self"])


def _product_added(op: str) -> Row:
    """``self + value * (tensor1 op tensor2)``."""

    def write(w: ChainWriter, given: Arguments) -> ChainOperand | None:
        value, first = given["value"], given["tensor1"]
        scaled = first if value == 1 else w("mul", first, value)
        return w("add", given["self"], w(op, scaled, given["tensor2"]))

    return write


def _leaky_relu(w: ChainWriter, given: Arguments) -> ChainOperand | None:
    x, slope = given["self"], given["negative_slope"]
    return w("where", w("gt", x, 0.0), x, w("mul", x, slope))


def _cast(w: ChainWriter, given: Arguments) -> ChainOperand | None:
    """The fuser stores it as its dtype; only truth is computed."""
    return w("ne", given["self"], 0.0)


_UNARY = (
    "neg abs exp expm1 log log1p log2 sqrt rsqrt reciprocal square sin cos tanh sigmoid erf relu "
    "silu floor ceil trunc isnan"
)
_COMPARISONS = ("gt", "ge", "lt", "le", "eq", "ne")

ROWS: Mapping[str, Row] = {
    **{f"aten.{name}.default": _plain(name, "self") for name in _UNARY.split()},
    **{
        f"aten.{name}.{kind}": _plain(name, "self", "other")
        for name in _COMPARISONS
        for kind in ("Tensor", "Scalar")
    },
    "aten.sign.default": _plain("sign", "self"),
    "aten.round.default": _plain("round", "self"),
    "aten.logical_not.default": _plain("not", "self"),
    "aten.logical_and.default": _plain("and", "self", "other"),
    "aten.logical_or.default": _plain("or", "self", "other"),
    "aten.gelu.default": _gelu(backward=False),
    "aten.add.Tensor": _scaled("add", "self", "other"),
    "aten.add.Scalar": _scaled("add", "self", "other"),
    "aten.sub.Tensor": _scaled("sub", "self", "other"),
    "aten.sub.Scalar": _scaled("sub", "self", "other"),
    "aten.rsub.Scalar": lambda w, given: _scaled("sub", "other", "self")(w, given),
    "aten.mul.Tensor": _plain("mul", "self", "other"),
    "aten.mul.Scalar": _plain("mul", "self", "other"),
    "aten.div.Tensor": _divide,
    "aten.div.Scalar": _divide,
    "aten.pow.Tensor_Scalar": _power,
    "aten.pow.Tensor_Tensor": _plain("pow", "self", "exponent"),
    "aten.pow.Scalar": _plain("pow", "self", "exponent"),
    "aten.maximum.default": _plain("max", "self", "other"),
    "aten.minimum.default": _plain("min", "self", "other"),
    "aten.clamp.default": _clamp("min", "max"),
    "aten.clamp_min.default": _clamp("min", None),
    "aten.clamp_max.default": _clamp(None, "max"),
    "aten.hardtanh.default": _clamp("min_val", "max_val"),
    "aten.where.self": _plain("where", "condition", "self", "other"),
    "aten.where.ScalarOther": _plain("where", "condition", "self", "other"),
    "aten.where.ScalarSelf": _plain("where", "condition", "self", "other"),
    "aten.masked_fill.Scalar": _masked_fill,
    "aten.masked_fill.Tensor": _masked_fill,
    "aten.addcmul.default": _product_added("mul"),
    "aten.addcdiv.default": _product_added("div"),
    "aten.leaky_relu.default": _leaky_relu,
    "aten.tanh_backward.default": _plain("tanh_bwd", "grad_output", "output"),
    "aten.sigmoid_backward.default": _plain("sigmoid_bwd", "grad_output", "output"),
    "aten.threshold_backward.default": _relu_backward,
    "aten.silu_backward.default": _plain("silu_bwd", "grad_output", "self"),
    "aten.gelu_backward.default": _gelu(backward=True),
    "aten._to_copy.default": _cast,
}
"""By the operator's full name. Casts between floats are no instruction: see `fuse_pointwise`."""

BITWISE: Mapping[str, str] = {
    "aten.bitwise_and.Tensor": "and",
    "aten.bitwise_or.Tensor": "or",
    "aten.bitwise_not.default": "not",
}
"""What is logic where all is bool."""


# --- families -------------------------------------------------------------------------------------


CAST = "aten._to_copy.default"
LARGEST_EXACT = 2**24
"""Up to here every whole number is a float of 32 bits."""

_HALVES = frozenset({"f16", "bf16"})
_FLOATS = frozenset({"f64", "f32"}) | _HALVES
_INTEGERS = frozenset({"i64", "i32", "i16", "i8", "u8"})
_LOGIC = frozenset({"logical_not", "logical_and", "logical_or", "isnan"})


class Family(NamedTuple):
    """What nodes must have alike to fuse: in what they compute, and how large their results are."""

    wide: str
    shape: tuple[int, ...]


def family(graph: IRGraph, node: IRNode) -> Family | None:
    """With what a node may fuse, None where it is not elementwise or its rounding would change."""
    if node.op not in ROWS and node.op not in BITWISE:
        return None
    made = graph.values[node.outputs[0]]
    dtypes = [graph.values[value_id].dtype for value_id in node.inputs]
    wide = _wide(node, made.dtype, dtypes)
    if wide is None or made.numel == 0 or length(node) is None:
        return None
    return Family(wide, made.shape)


def _wide(node: IRNode, made: str, dtypes: Sequence[str]) -> str | None:
    """In what the node computes; None where a chain would round in another way."""
    if node.op == CAST:
        return _wide_of_cast(node, made, dtypes[0])
    if node.op in BITWISE:
        return "f32" if {made, *dtypes} == {"bool"} else None
    floats = _FLOATS.intersection(dtypes)
    integers = _INTEGERS.intersection(dtypes)
    if len(floats) + len(integers) + ("bool" in dtypes) < len(set(dtypes)):
        return None
    name = node.op.split(".")[1]
    if name in _COMPARISONS or name in _LOGIC:
        one_width = floats <= {"f64"} or "f64" not in floats
        exact = not integers or (name in _COMPARISONS and _compares_small_number(node))
        wide = "f64" if "f64" in floats else "f32"
        return wide if made == "bool" and one_width and exact else None
    if made in _HALVES:
        return "f32" if floats == {made} and not integers else None
    if made == "f32":
        return "f32" if "f64" not in floats else None
    return "f64" if made == "f64" else None


def _wide_of_cast(node: IRNode, made: str, given: str) -> str | None:
    attrs = node.attrs
    plain = attrs["memory_format"] in (None, torch.preserve_format) and not attrs["pin_memory"]
    if not plain or attrs["layout"] not in (None, torch.strided):
        return None
    if given in _INTEGERS and made not in ("f32", "f64", "bool"):
        return None
    if not {given, made} <= _FLOATS | _INTEGERS | {"bool"} or made in _INTEGERS:
        return None
    return "f64" if "f64" in (given, made) else "f32"


def _compares_small_number(node: IRNode) -> bool:
    """Whether integers are compared with a number, so that they may be rounded to floats before."""
    other = node.attrs.get("other")
    return isinstance(other, (bool, int)) and abs(other) <= LARGEST_EXACT


_lengths: dict[tuple[str, str], int | None] = {}


def length(node: IRNode) -> int | None:
    """How many instructions the operator is with these attributes; None where it cannot be any."""
    key = (node.op, repr(node.attrs))
    if key not in _lengths:
        writer = ChainWriter(ChainInput)
        try:
            made = instructions(writer, node)
        except (TypeError, ValueError):  # a number that is no float
            made = None
        _lengths[key] = None if made is None else len(writer.instructions)
    return _lengths[key]


def instructions(writer: ChainWriter, node: IRNode) -> ChainOperand | None:
    """Append what computes the node's result."""
    given = arguments(node)
    if node.op in BITWISE:
        names = ("self", "other") if "other" in given else ("self",)
        return writer(BITWISE[node.op], *(given[name] for name in names))
    return ROWS[node.op](writer, given)
