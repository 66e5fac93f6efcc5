"""Calls of elementwise operators."""

import torch

from shardwright.ir import DROPOUT, resolve
from shardwright.ops.rows.elementwise import ROWS
from shardwright.torch_internals import schema_of
from tests.ops.case import B, C, Case, F, I, K, T, U, case, sizes_of

SPECIAL: list[Case] = [
    case("acosh.default", T("a b", lambda s, _: 1 + torch.rand(s, dtype=torch.float64))),
    case("bitwise_not.default", I("a b", 9)),
    case("logical_not.default", B("a b")),
    case("threshold.default", F("a b"), 0.1, 0.0),
    case("clamp.default", F("a b"), -0.3, 0.3),
    case("clip.default", F("a b"), -0.3, 0.3),
    case("clamp_min.default", F("a b"), 0.3),
    case("clamp_max.default", F("a b"), 0.3),
    case("full_like.default", F("a b"), 3.0),
    case("erfinv.default", U("a b")),
    case("real.default", C("a b")),
    case("imag.default", C("a b")),
    *[case("gelu.default", F("a b c"), approximate=how) for how in ("none", "tanh")],
    case("round.decimals", F("a b"), decimals=1),
    case("pow.Tensor_Scalar", U("a b"), 3),
    case("pow.Scalar", 2.0, F("a b")),
    case("rsub.Scalar", F("a b"), 2.0),
    case("remainder.Scalar_Tensor", 2.0, K("a b")),
    case("to.dtype", F("a b"), torch.float32),
    case("to.device", F("a b"), torch.device("cpu"), torch.float32),
    case("to.dtype_layout", F("a b"), dtype=torch.float32),
    case("fill.Scalar", F("a b"), 2.0),
    case("masked_fill.Scalar", F("a b c"), B("b 1"), -1.0),
    case("masked_fill.Tensor", F("a b"), B("a b"), F("")),
    case("where.self", B("a 1 c"), F("b c"), F("a b 1")),
    case("where.ScalarOther", B("a b"), F("a b"), 0.5),
    case("where.ScalarSelf", B("a b"), 0.5, F("a b")),
    case("where.Scalar", B("a b"), 0.5, 1.5),
    case("lerp.Scalar", F("a b"), F("a b"), 0.3),
    case("lerp.Tensor", F("a b"), F("a b"), U("b")),
    case("addcmul.default", F("a b"), F("a b"), F("b"), value=2),
    case("addcdiv.default", F("a b"), F("a b"), U("b"), value=2),
    case("clamp.Tensor", F("a b"), F("b"), None),
    case("clip.Tensor", F("a b"), F("b"), None),
    case("div.Tensor_mode", F("a b"), U("b"), rounding_mode="floor"),
    case("div.Scalar_mode", F("a b"), 0.3, rounding_mode="floor"),
    case("floor_divide.Scalar", K("a b"), 0.3),
    case("floor_divide.default", K("a b"), K("b")),
    case("heaviside.default", K("a b"), K("b")),
    case("logical_and.default", B("a b"), B("a 1")),
    case("logical_or.default", B("a b"), B("a 1")),
    case("logical_xor.default", B("a b"), B("a 1")),
    case("expand_as.default", F("a 1"), F("a b")),
    case("polar.default", U("a b"), F("a b")),
    case("complex.default", F("a b"), F("a b")),
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


def plain(op: str) -> Case:
    """A call on tensors that are broadcast, and numbers."""
    whole = "bitwise" in op or "__" in op
    sizes = iter(("a b c", "b 1", "c"))
    args = []
    for argument in schema_of(resolve(op)).arguments:
        if argument.has_default_value():
            break
        if str(argument.type) == "Tensor":
            dims = next(sizes)
            args.append(I(dims, 9) if whole else U(dims))
        elif str(argument.type) == "List[Tensor]":
            args.append([U("a 1"), U("b"), U("")])
        else:
            args.append(5 if whole else 0.7)
    return Case(op, tuple(args), {})


ELEMENTWISE: list[Case] = [
    *SPECIAL,
    *(
        plain(op)
        for op, row in ROWS.items()
        if row.rule is not None and op not in {special.op for special in SPECIAL}
    ),
]
