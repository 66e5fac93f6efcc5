"""Calls of elementwise operators."""

import torch

from shardwright.ir import DROPOUT
from shardwright.ops.catalog_elementwise import OVERLOADS, TENSOR_AND_SCALAR, UNARY
from tests.ops.case import B, C, Case, F, I, K, T, U, case, sizes_of

SPECIAL_UNARY = {
    "acosh": [case("acosh.default", T("a b", lambda s, _: 1 + torch.rand(s, dtype=torch.float64)))],
    "bitwise_not": [case("bitwise_not.default", I("a b", 9))],
    "logical_not": [case("logical_not.default", B("a b"))],
    "threshold": [case("threshold.default", F("a b"), 0.1, 0.0)],
    "clamp": [case("clamp.default", F("a b"), -0.3, 0.3)],
    "clip": [case("clip.default", F("a b"), -0.3, 0.3)],
    "clamp_min": [case("clamp_min.default", F("a b"), 0.3)],
    "clamp_max": [case("clamp_max.default", F("a b"), 0.3)],
    "full_like": [case("full_like.default", F("a b"), 3.0)],
    "erfinv": [case("erfinv.default", U("a b"))],
    "real": [case("real.default", C("a b"))],
    "imag": [case("imag.default", C("a b"))],
    "gelu": [case("gelu.default", F("a b c"), approximate=how) for how in ("none", "tanh")],
}
SPECIAL_OVERLOADS = {
    "round.decimals": [case("round.decimals", F("a b"), decimals=1)],
    "pow.Tensor_Scalar": [case("pow.Tensor_Scalar", U("a b"), 3)],
    "pow.Scalar": [case("pow.Scalar", 2.0, F("a b"))],
    "rsub.Scalar": [case("rsub.Scalar", F("a b"), 2.0)],
    "remainder.Scalar_Tensor": [case("remainder.Scalar_Tensor", 2.0, K("a b"))],
    "to.dtype": [case("to.dtype", F("a b"), torch.float32)],
    "to.device": [case("to.device", F("a b"), torch.device("cpu"), torch.float32)],
    "to.dtype_layout": [case("to.dtype_layout", F("a b"), dtype=torch.float32)],
    "fill.Scalar": [case("fill.Scalar", F("a b"), 2.0)],
    "masked_fill.Scalar": [case("masked_fill.Scalar", F("a b c"), B("b 1"), -1.0)],
    "masked_fill.Tensor": [case("masked_fill.Tensor", F("a b"), B("a b"), F(""))],
    "where.self": [case("where.self", B("a 1 c"), F("b c"), F("a b 1"))],
    "where.ScalarOther": [case("where.ScalarOther", B("a b"), F("a b"), 0.5)],
    "where.ScalarSelf": [case("where.ScalarSelf", B("a b"), 0.5, F("a b"))],
    "where.Scalar": [case("where.Scalar", B("a b"), 0.5, 1.5)],
    "lerp.Scalar": [case("lerp.Scalar", F("a b"), F("a b"), 0.3)],
    "lerp.Tensor": [case("lerp.Tensor", F("a b"), F("a b"), U("b"))],
    "addcmul.default": [case("addcmul.default", F("a b"), F("a b"), F("b"), value=2)],
    "addcdiv.default": [case("addcdiv.default", F("a b"), F("a b"), U("b"), value=2)],
    "clamp.Tensor": [case("clamp.Tensor", F("a b"), F("b"), None)],
    "clip.Tensor": [case("clip.Tensor", F("a b"), F("b"), None)],
    "div.Tensor_mode": [case("div.Tensor_mode", F("a b"), U("b"), rounding_mode="floor")],
    "div.Scalar_mode": [case("div.Scalar_mode", F("a b"), 0.3, rounding_mode="floor")],
    "floor_divide.Scalar": [case("floor_divide.Scalar", K("a b"), 0.3)],
    "floor_divide.default": [case("floor_divide.default", K("a b"), K("b"))],
    "heaviside.default": [case("heaviside.default", K("a b"), K("b"))],
    "logical_and.default": [case("logical_and.default", B("a b"), B("a 1"))],
    "logical_or.default": [case("logical_or.default", B("a b"), B("a 1"))],
    "logical_xor.default": [case("logical_xor.default", B("a b"), B("a 1"))],
    "expand_as.default": [case("expand_as.default", F("a 1"), F("a b"))],
    "polar.default": [case("polar.default", U("a b"), F("a b"))],
    "complex.default": [case("complex.default", F("a b"), F("a b"))],
}


def every_row():
    for name in UNARY:
        yield from SPECIAL_UNARY.get(name, [case(f"{name}.default", U("a b"))])
    for name in OVERLOADS:
        yield from SPECIAL_OVERLOADS.get(name, [case(name, U("a b c"), U("b 1"))])
    for name in TENSOR_AND_SCALAR:
        whole = "bitwise" in name or "__" in name
        yield case(f"{name}.Tensor", *([I("a b", 9), I("b", 9)] if whole else [F("a b"), U("b")]))
        yield case(f"{name}.Scalar", *([I("a b", 9), 5] if whole else [F("a b"), 0.7]))


ELEMENTWISE: list[Case] = [
    *every_row(),
    case("add.Tensor", F("a 1 c"), F("b 1"), alpha=2),
    case("mul.Tensor", F("a b"), F("")),
    case("dropout.default", F("a b"), 0.5, False),
    case("feature_dropout.default", F("a b"), 0.5, False),
    case("alpha_dropout.default", F("a b"), 0.5, False),
    Case(DROPOUT, (F("a b c"), 0.5, 7, I("1", 9), 2, [0] * 3, sizes_of("a b c")), {}),
    Case(DROPOUT, (F("a b"), 0.5, 7, I("1", 9), 2, [3, 2], [12, 12]), {}),
    case("type_as.default", F("a b"), I("c", 9)),
    case("to.other", F("a b"), K("c")),
    case("prelu.default", F("a b c"), F("b")),
    case("prelu.default", F("a b c"), F("1")),
    case("glu.default", F("a b*2 c"), 1),
]
