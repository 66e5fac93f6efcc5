"""Rows of elementwise and broadcasting operators: ``x + y``, ``torch.exp(x)``, ``x.masked_fill()``.

add.Tensor(x, 2.0)             x + 2.0
add.Tensor(x, y, alpha=2)      torch.add(x, y, alpha=2)
pow.Tensor_Scalar(x, 2)        x ** 2
to.dtype(x, f32)               x.to(torch.float32)
"""

from __future__ import annotations

import torch

from shardwright.codegenerate.expression import Binding, Expression
from shardwright.codegenerate.spelling.arguments import Style
from shardwright.codegenerate.spelling.call import Call, Row
from shardwright.codegenerate.spelling.forms import (
    attribute,
    first_of,
    function,
    infix,
    method,
    prefix,
    reflected,
    words,
)
from shardwright.ir import SLOT
from shardwright.ir.tensor_meta import torch_dtype

INFIX: dict[str, tuple[str, Binding]] = {
    "add.Tensor": ("+", Binding.SUM),
    "sub.Tensor": ("-", Binding.SUM),
    "mul.Tensor": ("*", Binding.PRODUCT),
    "div.Tensor": ("/", Binding.PRODUCT),
    "floor_divide.default": ("//", Binding.PRODUCT),
    "remainder.Scalar": ("%", Binding.PRODUCT),
    "remainder.Tensor": ("%", Binding.PRODUCT),
    "matmul.default": ("@", Binding.PRODUCT),
    "pow.Tensor_Scalar": ("**", Binding.POWER),
    "pow.Tensor_Tensor": ("**", Binding.POWER),
    "pow.Scalar": ("**", Binding.POWER),
    "__and__.Tensor": ("&", Binding.BIT_AND),
    "__and__.Scalar": ("&", Binding.BIT_AND),
    "__or__.Tensor": ("|", Binding.BIT_OR),
    "__or__.Scalar": ("|", Binding.BIT_OR),
    "__xor__.Tensor": ("^", Binding.BIT_XOR),
    "__xor__.Scalar": ("^", Binding.BIT_XOR),
    "__lshift__.Tensor": ("<<", Binding.SHIFT),
    "__lshift__.Scalar": ("<<", Binding.SHIFT),
    "__rshift__.Tensor": (">>", Binding.SHIFT),
    "__rshift__.Scalar": (">>", Binding.SHIFT),
    **{
        f"{name}.{kind}": (symbol, Binding.COMPARISON)
        for name, symbol in zip(words("eq ne lt le gt ge"), words("== != < <= > >="), strict=True)
        for kind in ("Tensor", "Scalar")
    },
}

FUNCTIONS = words("""
    exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal sin cos tan asin acos atan sinh
    cosh tanh asinh acosh atanh erf erfc erfinv lgamma digamma sigmoid logit ceil floor round trunc
    frac sign sgn logical_not isnan isinf isfinite nan_to_num real imag angle conj_physical deg2rad
    rad2deg maximum minimum fmax fmin atan2 hypot polar complex logaddexp logaddexp2 logical_and
    logical_or logical_xor heaviside nextafter isclose addcmul addcdiv
""")

OVERLOADS = words("""
    round.decimals copysign.Tensor xlogy.Tensor lerp.Scalar lerp.Tensor where.self where.ScalarOther
    where.ScalarSelf where.Scalar add.Tensor sub.Tensor rsub.Scalar div.Tensor_mode
    fmod.Tensor fmod.Scalar bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor
    bitwise_left_shift.Tensor bitwise_right_shift.Tensor special_expit.default
""")
"""Written as ``torch.name`` where they have no infix form."""

METHODS = words("""
    abs.default clamp.default clamp.Tensor clamp_min.default clamp_max.default masked_fill.Scalar
    masked_fill.Tensor clone.default type_as.default positive.default detach.default
""")

ACTIVATIONS = words("""
    relu relu6 gelu silu mish elu selu celu leaky_relu hardtanh hardswish hardsigmoid softplus
    threshold hardshrink softshrink glu prelu
""")


def contiguous(call: Call) -> Expression | None:
    """``x.contiguous()``, which Python does not call on a tensor that is contiguous."""
    return method("contiguous")(call) if call.operand("self").value.strides else None


def to_device(call: Call) -> Expression | None:
    """``x.to(x.device, copy=True)``: without a dtype Python calls the overload with a layout."""
    same = torch_dtype(call.operand("self").value.dtype) == call.arguments["dtype"]
    strided = call.arguments["layout"] is torch.strided and call.arguments["pin_memory"] is None
    if not (same and strided and call.arguments["device"] is SLOT and call.device):
        return None
    order = ("self", "device", "non_blocking", "copy", "memory_format")
    return method("to", Style(order=order, front=2))(call)


def equality(name: str, symbol: str) -> Row:
    """``x == 2``, and ``torch.eq(x, True)``: linters take ``x == True`` for a mistake."""
    compared, called = infix(symbol, Binding.COMPARISON), function(f"torch.{name}")

    def row(call: Call) -> Expression | None:
        has_truth = any(isinstance(value, bool) for value in call.arguments.values())
        return called(call) if has_truth else compared(call)

    return row


ROWS: dict[str, Row] = {
    **{f"aten.{name}": method(name.partition(".")[0]) for name in METHODS},
    **{f"aten.{name}.default": function(f"torch.{name}") for name in FUNCTIONS},
    **{f"aten.{name}.default": function(f"F.{name}") for name in ACTIVATIONS},
    **{f"aten.{name}": function(f"torch.{name.partition('.')[0]}") for name in OVERLOADS},
    **{f"aten.{name}": infix(*form) for name, form in INFIX.items()},
    "aten.eq.Scalar": equality("eq", "=="),
    "aten.ne.Scalar": equality("ne", "!="),
    "aten.add.Tensor": first_of(infix("+", Binding.SUM), function("torch.add")),
    "aten.sub.Tensor": first_of(infix("-", Binding.SUM), function("torch.sub")),
    "aten.rsub.Scalar": first_of(reflected("-", Binding.SUM), function("torch.rsub")),
    "aten.neg.default": prefix("-"),
    "aten.bitwise_not.default": prefix("~"),
    "aten.log_sigmoid.default": function("F.logsigmoid"),
    "aten.special_expit.default": function("torch.special.expit"),
    "aten.to.dtype": method("to"),
    "aten.to.device": method("to"),
    "aten.to.dtype_layout": to_device,
    "aten.contiguous.default": contiguous,
    "aten.mT.default": attribute("mT"),
    "aten.mH.default": attribute("mH"),
    "aten.numpy_T.default": attribute("T"),
    "aten.matrix_H.default": attribute("H"),
}
