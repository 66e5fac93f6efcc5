"""Operators of torch as instructions of a chain: one row each.

Comes in: a node whose operator is a row of `ROWS`. Goes out: the instructions that compute what it
computes of one element, or None where it has arguments that no instruction has. What always holds:
the steps are those of torch's own kernel, so that the same numbers are rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shardwright.compiler.passes.rewriter import Tensor
from shardwright.kernels.chains import ChainInput, ChainInstruction, ChainOperand, ChainResult

Arguments = Mapping[str, Any]


class Writer:
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


Row = Callable[[Writer, Arguments], ChainOperand | None]


def _plain(op: str, *names: str) -> Row:
    """One instruction on the arguments of these names."""

    def write(w: Writer, given: Arguments) -> ChainOperand | None:
        return w(op, *(given[name] for name in names))

    return write


def _scaled(op: str, first: str, second: str) -> Row:
    """``first op alpha * second``."""

    def write(w: Writer, given: Arguments) -> ChainOperand | None:
        alpha = given["alpha"]
        other = given[second]
        return w(op, given[first], other if alpha == 1 else w("mul", other, alpha))

    return write


def _gelu(backward: bool) -> Row:
    names = ("grad_output", "self") if backward else ("self",)

    def write(w: Writer, given: Arguments) -> ChainOperand | None:
        op = "gelu_tanh" if given["approximate"] == "tanh" else "gelu"
        return w(f"{op}_bwd" if backward else op, *(given[name] for name in names))

    return write


def _relu_backward(w: Writer, given: Arguments) -> ChainOperand | None:
    if isinstance(given["threshold"], Tensor) or given["threshold"] != 0:
        return None
    return w("relu_bwd", given["grad_output"], given["self"])


def _power(w: Writer, given: Arguments) -> ChainOperand | None:
    """As torch does whole and half powers."""
    x, exponent = given["self"], given["exponent"]
    if isinstance(exponent, Tensor) or exponent not in _POWERS:
        return w("pow", x, exponent)
    return _POWERS[exponent](w, x)


_POWERS: Mapping[float, Callable[[Writer, Any], ChainOperand]] = {
    2: lambda w, x: w("square", x),
    3: lambda w, x: w("mul", w("square", x), x),
    0.5: lambda w, x: w("sqrt", x),
    -0.5: lambda w, x: w("rsqrt", x),
    -1: lambda w, x: w("reciprocal", x),
    -2: lambda w, x: w("reciprocal", w("square", x)),
}


def _divide(w: Writer, given: Arguments) -> ChainOperand | None:
    return w("div", given["self"], given["other"])


def _clamp(low: str | None, high: str | None) -> Row:
    def write(w: Writer, given: Arguments) -> ChainOperand | None:
        made = given["self"]
        if low and given[low] is not None:
            made = w("max", made, given[low])
        if high and given[high] is not None:
            made = w("min", made, given[high])
        return made if isinstance(made, ChainResult) else None

    return write


def _masked_fill(w: Writer, given: Arguments) -> ChainOperand | None:
    return w("where", given["mask"], given["value"], given["self"])


def _product_added(op: str) -> Row:
    """``self + value * (tensor1 op tensor2)``."""

    def write(w: Writer, given: Arguments) -> ChainOperand | None:
        value, first = given["value"], given["tensor1"]
        scaled = first if value == 1 else w("mul", first, value)
        return w("add", given["self"], w(op, scaled, given["tensor2"]))

    return write


def _leaky_relu(w: Writer, given: Arguments) -> ChainOperand | None:
    x, slope = given["self"], given["negative_slope"]
    return w("where", w("gt", x, 0.0), x, w("mul", x, slope))


def _cast(w: Writer, given: Arguments) -> ChainOperand | None:
    """The fuser stores it as its dtype; only truth is computed."""
    return w("ne", given["self"], 0.0)


_UNARY = (
    "neg abs exp expm1 log log1p log2 sqrt rsqrt reciprocal square sin cos tanh sigmoid erf relu "
    "silu floor ceil trunc isnan"
)
_COMPARISONS = "gt ge lt le eq ne"

ROWS: Mapping[str, Row] = {
    **{f"aten.{name}.default": _plain(name, "self") for name in _UNARY.split()},
    **{
        f"aten.{name}.{kind}": _plain(name, "self", "other")
        for name in _COMPARISONS.split()
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
"""By the operator's full name. Casts between floats are no instruction: see `fuse_elementwise`."""

BITWISE: Mapping[str, str] = {
    "aten.bitwise_and.Tensor": "and",
    "aten.bitwise_or.Tensor": "or",
    "aten.bitwise_not.default": "not",
}
"""What is logic where all is bool."""
