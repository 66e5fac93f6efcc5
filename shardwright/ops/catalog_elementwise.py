"""Rows of elementwise and broadcasting operators: every dimension splits.

    add, (2, 12, 8) and (12, 1)    a b c, b 1 -> a b c

A size of 1 is the number 1: it is broadcast, or there is nothing to split. Casts, copies, dropout
that is off or that is a function of the place (`ir.dropout`), and fills like another tensor are
elementwise too.
"""

from __future__ import annotations

from shardwright.ir import DROPOUT
from shardwright.ops.call import Call, Local, Row, Rule, aligned, named, text, words

UNARY = words("""
    abs neg positive exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal sin cos tan
    asin acos atan sinh cosh tanh asinh acosh atanh erf erfc erfinv lgamma digamma sigmoid logit
    special_expit relu relu6 gelu silu mish elu selu celu leaky_relu hardtanh hardswish hardsigmoid
    softplus log_sigmoid threshold hardshrink softshrink ceil floor round trunc frac sign sgn
    logical_not bitwise_not isnan isinf isfinite nan_to_num clamp clamp_min clamp_max clip deg2rad
    rad2deg clone contiguous alias detach lift_fresh_copy _to_copy zeros_like ones_like full_like
    empty_like real imag angle conj_physical
""")

OVERLOADS = words("""
    round.decimals pow.Tensor_Tensor pow.Tensor_Scalar pow.Scalar rsub.Scalar
    remainder.Scalar_Tensor to.dtype to.device to.dtype_layout fill.Scalar masked_fill.Scalar
    masked_fill.Tensor where.self where.ScalarOther where.ScalarSelf where.Scalar lerp.Scalar
    lerp.Tensor addcmul.default addcdiv.default clamp.Tensor clip.Tensor clamp_min.Tensor
    clamp_max.Tensor div.Tensor_mode div.Scalar_mode maximum.default minimum.default fmax.default
    fmin.default max.other min.other atan2.default hypot.default polar.default complex.default
    logaddexp.default logaddexp2.default logical_and.default logical_or.default logical_xor.default
    expand_as.default heaviside.default copysign.Tensor nextafter.default isclose.default
    xlogy.Tensor floor_divide.default floor_divide.Scalar
""")

TENSOR_AND_SCALAR = words("""
    add sub mul div true_divide remainder fmod eq ne lt le gt ge not_equal __and__ __or__ __xor__
    bitwise_and bitwise_or bitwise_xor
""")

LINEAR: dict[str, tuple[tuple[int, ...], ...]] = {
    "aten.add.Tensor": ((0, 1),),
    "aten.sub.Tensor": ((0, 1),),
    "aten.mul.Tensor": ((0,), (1,)),
    "aten.mul.Scalar": ((0,),),
    "aten.div.Tensor": ((0,),),
    "aten.div.Scalar": ((0,),),
    "aten.neg.default": ((0,),),
    "aten.positive.default": ((0,),),
    "aten.clone.default": ((0,),),
    "aten.contiguous.default": ((0,),),
    "aten.alias.default": ((0,),),
    "aten.detach.default": ((0,),),
    "aten.expand_as.default": ((0,),),
    "aten.where.self": ((1, 2),),
    "aten.dropout.default": ((0,),),
}


def broadcast(call: Call) -> Rule:
    """Inputs are broadcast to the output, each dimension on its own."""
    full = call.outputs[0]
    names = named(full)
    inputs = [aligned(shape, names, full) for shape in call.inputs]
    linear = tuple(inputs for inputs in LINEAR.get(call.op, ()) if max(inputs) < len(call.inputs))
    return Rule(text(inputs, [names]), linear=linear)


def dropout(call: Call) -> Rule | None:
    """The identity where it is off; where it is on, parts would draw other numbers."""
    random = call.attrs["train"] and call.attrs["p"] > 0
    return None if random else broadcast(call)


def philox_dropout(call: Call) -> Rule:
    """A part says where in the whole it begins, and so drops what the whole does."""
    names = named(call.outputs[0])

    def attrs(local: Local) -> dict[str, list[int]]:
        offsets = zip(call.attrs["offsets"], names, strict=True)
        return {"offsets": [offset + local.start(name) for offset, name in offsets]}

    return Rule(text([names, ["1"]], [names]), attrs=attrs, linear=((0,),))


def dtype_of_second(call: Call) -> Rule:
    """The first input, cast: of the second only the dtype is read."""
    names = named(call.outputs[0])
    return Rule(text([names, "?"], [names]))


def prelu(call: Call) -> Rule:
    """A slope for all, or one a channel, which is dimension 1."""
    shape, slopes = call.inputs
    names = named(shape)
    channels = names[1] if len(shape) > 1 and slopes not in ((), (1,)) else "1"
    return Rule(text([names, [channels] if slopes else []], [names]))


def glu(call: Call) -> Rule:
    """Halves of one dimension are multiplied: that one stays whole."""
    dim = call.dim()
    names = named(call.inputs[0])
    ends = [list(names), list(names)]
    for end, shape in zip(ends, (call.inputs[0], call.outputs[0]), strict=True):
        end[dim] = str(shape[dim])
    return Rule(text(ends[:1], ends[1:]))


ROWS: dict[str, Row] = {
    **{f"aten.{name}.default": broadcast for name in UNARY},
    **{f"aten.{name}": broadcast for name in OVERLOADS},
    **{
        f"aten.{name}.{kind}": broadcast
        for name in TENSOR_AND_SCALAR
        for kind in ("Tensor", "Scalar")
    },
    "aten.dropout.default": dropout,
    "aten.feature_dropout.default": dropout,
    "aten.alpha_dropout.default": dropout,
    DROPOUT: philox_dropout,
    "aten.type_as.default": dtype_of_second,
    "aten.to.other": dtype_of_second,
    "aten.prelu.default": prelu,
    "aten.glu.default": glu,
}
