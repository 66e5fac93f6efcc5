"""Samples of elementwise and broadcasting operators."""

from __future__ import annotations

import math

import torch

from shardwright.codegenerate.spelling.forms import words
from tests.codegenerate.spelling_samples import M, X, Y, f, i
from tests.codegenerate.spelling_samples import Sample as S

ELEMENTWISE = [
    S("add.Tensor", (X, Y), "a + b"),
    S("add.Tensor", (X, 2), "a + 2"),
    S("add.Tensor", (X, -1.5), "a + -1.5"),
    S("add.Tensor", (X, Y), "torch.add(a, b, alpha=2)", {"alpha": 2}),
    S("add.Tensor", (X, math.inf), 'a + float("inf")'),
    S("add.Tensor", (X, torch.finfo(torch.float32).min), "a + torch.finfo(torch.float32).min"),
    S("add.Scalar", (X, 2), "torch.ops.aten.add.Scalar(a, 2)"),
    S("sub.Tensor", (X, Y), "a - b"),
    S("sub.Tensor", (X, Y), "torch.sub(a, b, alpha=0.5)", {"alpha": 0.5}),
    S("rsub.Scalar", (X, 1.0), "1.0 - a"),
    S("mul.Tensor", (X, 0.125), "a * 0.125"),
    S("mul.Tensor", (X, Y), "a * b"),
    S("div.Tensor", (X, Y), "a / b"),
    S("div.Tensor", (X, 8), "a / 8"),
    S(
        "div.Tensor_mode",
        (X, 2),
        'torch.div(a, 2, rounding_mode="floor")',
        {"rounding_mode": "floor"},
    ),
    S("floor_divide.default", (i(4, below=9), 2), "a // 2"),
    S("floor_divide.default", (X, Y), "a // b"),
    S("remainder.Scalar", (i(4, below=9), 2), "a % 2"),
    S("remainder.Tensor", (X, Y), "a % b"),
    S("fmod.Scalar", (X, 2.0), "torch.fmod(a, 2.0)"),
    S("fmod.Tensor", (X, Y), "torch.fmod(a, b)"),
    S("matmul.default", (f(2, 3), f(3, 4)), "a @ b"),
    S("pow.Tensor_Scalar", (X, 2), "a ** 2"),
    S("pow.Tensor_Scalar", (X, -0.5), "a ** -0.5"),
    S("pow.Tensor_Tensor", (X, Y), "a ** b"),
    S("pow.Scalar", (2.0, X), "2.0 ** a"),
    S("__and__.Tensor", (M, M), "a & b"),
    S("__and__.Scalar", (i(4), 1), "a & 1"),
    S("__or__.Tensor", (M, M), "a | b"),
    S("__or__.Scalar", (i(4), 1), "a | 1"),
    S("__xor__.Tensor", (M, M), "a ^ b"),
    S("__xor__.Scalar", (i(4), 1), "a ^ 1"),
    S("__lshift__.Tensor", (i(4), i(4)), "a << b"),
    S("__lshift__.Scalar", (i(4), 1), "a << 1"),
    S("__rshift__.Tensor", (i(4), i(4)), "a >> b"),
    S("__rshift__.Scalar", (i(4), 1), "a >> 1"),
    S("bitwise_and.Tensor", (M, M), "torch.bitwise_and(a, b)"),
    S("bitwise_or.Tensor", (M, M), "torch.bitwise_or(a, b)"),
    S("bitwise_xor.Tensor", (M, M), "torch.bitwise_xor(a, b)"),
    S("bitwise_left_shift.Tensor", (i(4), i(4)), "torch.bitwise_left_shift(a, b)"),
    S("bitwise_right_shift.Tensor", (i(4), i(4)), "torch.bitwise_right_shift(a, b)"),
    S("neg.default", (X,), "-a"),
    S("bitwise_not.default", (M,), "~a"),
    S("abs.default", (X,), "a.abs()"),
    *(
        S(f"{name}.{kind}", (X, other), f"a {symbol} {text}")
        for name, symbol in zip(words("eq ne lt le gt ge"), words("== != < <= > >="), strict=True)
        for kind, other, text in (("Tensor", Y, "b"), ("Scalar", 0.5, "0.5"))
    ),
    *(
        S(f"{name}.default", (X,), f"torch.{name}(a)")
        for name in words(
            """
            exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal sin
            cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf erfc erfinv lgamma digamma
            sigmoid ceil floor round trunc frac sign
            sgn logical_not isnan isinf isfinite nan_to_num deg2rad rad2deg angle conj_physical
        """
        )
    ),
    S("real.default", (f(3, dtype="c64"),), "torch.real(a)"),
    S("imag.default", (f(3, dtype="c64"),), "torch.imag(a)"),
    S("logit.default", (X,), "torch.logit(a)"),
    S("logit.default", (X, 1e-6), "torch.logit(a, eps=1e-06)"),
    *(
        S(f"{name}.default", (X, Y), f"torch.{name}(a, b)")
        for name in words(
            """
            maximum minimum fmax fmin atan2 hypot polar complex logaddexp logaddexp2
            logical_and logical_or logical_xor heaviside nextafter isclose
        """
        )
    ),
    S("special_expit.default", (X,), "torch.special.expit(a)"),
    S("round.decimals", (X,), "torch.round(a, decimals=2)", {"decimals": 2}),
    S("copysign.Tensor", (X, Y), "torch.copysign(a, b)"),
    S("xlogy.Tensor", (X, Y), "torch.xlogy(a, b)"),
    S("lerp.Scalar", (X, Y, 0.5), "torch.lerp(a, b, 0.5)"),
    S("lerp.Tensor", (X, Y, X), "torch.lerp(a, b, c)"),
    S("addcmul.default", (X, Y, X), "torch.addcmul(a, b, c, value=0.5)", {"value": 0.5}),
    S("addcdiv.default", (X, Y, X), "torch.addcdiv(a, b, c)"),
    S("where.self", (M, X, Y), "torch.where(a, b, c)"),
    S("where.ScalarOther", (M, X, 0.0), "torch.where(a, b, 0.0)"),
    S("where.ScalarSelf", (M, 1.0, X), "torch.where(a, 1.0, b)"),
    S("where.Scalar", (M, 1.0, 0.0), "torch.where(a, 1.0, 0.0)"),
    S("clamp.default", (X, 0.0), "a.clamp(min=0.0)"),
    S("clamp.default", (X,), "a.clamp(max=6)", {"max": 6}),
    S("clamp.default", (X, 0.0, 1.0), "a.clamp(min=0.0, max=1.0)"),
    S("clamp.Tensor", (X, Y), "a.clamp(b)"),
    S("clamp_min.default", (X, 0), "a.clamp_min(0)"),
    S("clamp_max.default", (X, 1.0), "a.clamp_max(1.0)"),
    S("masked_fill.Scalar", (X, M, -math.inf), 'a.masked_fill(b, float("-inf"))'),
    S("masked_fill.Tensor", (X, M, f()), "a.masked_fill(b, c)"),
    S("clone.default", (X,), "a.clone()"),
    S(
        "clone.default",
        (X,),
        "a.clone(memory_format=torch.contiguous_format)",
        {"memory_format": torch.contiguous_format},
    ),
    S("type_as.default", (i(4), f(3)), "a.type_as(b)"),
    S("detach.default", (X,), "a.detach()"),
    S("positive.default", (X,), "a.positive()"),
    S("contiguous.default", (f(3, 2, turned=True),), "a.contiguous()"),
    S("contiguous.default", (X,), "torch.ops.aten.contiguous.default(a)"),
    S("to.dtype", (X, torch.float64), "a.to(torch.float64)"),
    S("to.dtype", (X, torch.float32), "a.to(torch.float32, copy=True)", {"copy": True}),
    S("to.device", (X, "cpu", torch.float64), "a.to(a.device, torch.float64)"),
    S(
        "to.dtype_layout",
        (X,),
        "a.to(device=a.device, copy=True)",
        {"dtype": torch.float32, "device": "cpu", "layout": torch.strided, "copy": True},
    ),
    S(
        "to.dtype_layout",
        (X,),
        "torch.ops.aten.to.dtype_layout(a, dtype=torch.int64)",
        {"dtype": torch.int64},
        captured=False,
    ),
    S("copy.default", (X, Y), "torch.ops.aten.copy.default(a, b)"),
    *(
        S(f"{name}.default", (X,), f"F.{name}(a)")
        for name in ["relu", "relu6", "gelu", "silu", "mish", "selu", "hardswish", "hardsigmoid"]
    ),
    S("gelu.default", (X,), 'F.gelu(a, approximate="tanh")', {"approximate": "tanh"}),
    S("elu.default", (X,), "F.elu(a)"),
    S("elu.default", (X, 0.5), "F.elu(a, alpha=0.5)"),
    S("celu.default", (X, 0.5), "F.celu(a, alpha=0.5)"),
    S("leaky_relu.default", (X,), "F.leaky_relu(a)"),
    S("leaky_relu.default", (X, 0.2), "F.leaky_relu(a, negative_slope=0.2)"),
    S("hardtanh.default", (X, 0.0, 6.0), "F.hardtanh(a, min_val=0.0, max_val=6.0)"),
    S("softplus.default", (X,), "F.softplus(a)"),
    S("softplus.default", (X, 2), "F.softplus(a, beta=2)"),
    S("log_sigmoid.default", (X,), "F.logsigmoid(a)"),
    S("threshold.default", (X, 0.5, 0.0), "F.threshold(a, 0.5, 0.0)"),
    S("hardshrink.default", (X,), "F.hardshrink(a)"),
    S("softshrink.default", (X, 0.2), "F.softshrink(a, lambd=0.2)"),
    S("glu.default", (X,), "F.glu(a)"),
    S("glu.default", (f(2, 4, 3), 1), "F.glu(a, dim=1)"),
    S("prelu.default", (X, f(3)), "F.prelu(a, b)"),
    S("mT.default", (X,), "a.mT"),
    S("mH.default", (X,), "a.mH"),
    S("numpy_T.default", (f(2, 3),), "a.T"),
    S("matrix_H.default", (f(2, 3),), "a.H"),
]
