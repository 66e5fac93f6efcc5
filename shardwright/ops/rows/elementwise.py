"""Rows of elementwise operators and of those that make tensors of sizes: every dimension splits.

    add, (2, 12, 8) and (12, 1)    a b c, b 1 -> a b c
    zeros, (2, 12)                 -> a b
    arange, 10                     -> a        a part's numbers start where the part does
    new_zeros, (4,)                ? -> a      of the input only the dtype is read

A size of 1 is the number 1: it is broadcast, or there is nothing to split. Casts, copies, dropout
that is off or that is a function of the element's index (`ir.dropout`), and fills like another
tensor are elementwise too. Random numbers have no row: parts would draw others than the whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwright.ir import DROPOUT
from shardwright.ops.call import (
    CatalogCall,
    Emitter,
    Inputs,
    Local,
    OperatorRow,
    Rule,
    SplitRule,
    aligned,
    along,
    named,
    table,
    text,
)


def broadcast(*linear: tuple[int, ...]) -> SplitRule:
    """Inputs are broadcast to the outputs, each dimension on its own."""

    def rule(call: CatalogCall) -> Rule:
        full = call.outputs[0]
        names = named(full)
        inputs = [aligned(shape, names, full) for shape in call.inputs]
        present = tuple(together for together in linear if max(together) < len(inputs))
        return Rule(text(inputs, [names] * len(call.outputs)), linear=present)

    return rule


def dropout(call: CatalogCall) -> Rule | None:
    """The identity where it is off; where it is on, parts would draw other numbers."""
    random = call.attrs["train"] and call.attrs["p"] > 0
    return None if random else broadcast((0,))(call)


def philox_dropout(call: CatalogCall) -> Rule:
    """A part says where in the whole it begins, and so drops what the whole does."""
    names = named(call.outputs[0])

    def attrs(local: Local) -> dict[str, list[int]]:
        offsets = zip(call.attrs["offsets"], names, strict=True)
        return {"offsets": [offset + local.start(name) for offset, name in offsets]}

    return Rule(text([names, ["1"]], [names]), attrs=attrs, linear=((0,),))


def dtype_of_second(call: CatalogCall) -> Rule:
    """The first input, cast: of the second only the dtype is read."""
    names = named(call.outputs[0])
    return Rule(text([names, "?"], [names]))


def prelu(call: CatalogCall) -> Rule:
    """A slope for all, or one a channel, which is dimension 1."""
    shape, slopes = call.inputs
    names = named(shape)
    channels = names[1] if len(shape) > 1 and slopes not in ((), (1,)) else "1"
    return Rule(text([names, [channels] if slopes else []], [names]))


def glu(call: CatalogCall) -> Rule:
    """Halves of one dimension are multiplied."""
    return along(call, {call.dim()})


# --- tensors of sizes -----------------------------------------------------------------------------


def sized(call: CatalogCall) -> Rule:
    """The same value everywhere: a part has its own sizes."""
    full = call.outputs[0]
    names = named(full)
    return Rule(
        text(["?"] * len(call.inputs), [names]),
        lengths={name: size for name, size in zip(names, full, strict=True) if name != "1"},
        attrs=lambda local: {"size": local.size()},
    )


def arange(call: CatalogCall) -> Rule:
    """Evenly spaced numbers."""
    (length,) = call.outputs[0]
    if length < 2:
        return Rule(text([], [[str(length)]]))
    return Rule("-> n", lengths={"n": length}, emit=arange_part)


def arange_part(e: Emitter, local: Local, inputs: Inputs) -> Any:
    """The numbers from the part's first position on, as many as it has."""
    if "n" not in local.cuts:
        return None
    attrs = local.call.attrs
    start, step = attrs.get("start", 0), attrs.get("step", 1)
    if attrs["dtype"] is None and any(isinstance(attrs.get(k), float) for k in _BOUNDS):
        start = float(start)
    bounds = {
        "start": start + step * local.cuts["n"].start,
        "end": start + step * local.cuts["n"].end,
        "step": step,
    }
    return e.emit("aten.arange.start_step", inputs, {**attrs, **bounds})


_BOUNDS = ("start", "end", "step")


DRAWING = 2000
"""Operations for each element of a dropout that counts (`ir.dropout`): its random number."""

ROWS: Mapping[str, OperatorRow] = {
    **table(
        broadcast(),
        """
        abs exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal sin cos tan asin acos
        atan sinh cosh tanh asinh acosh atanh erf erfc erfinv lgamma digamma sigmoid logit
        special_expit relu relu6 mish elu selu celu leaky_relu hardtanh hardswish
        hardsigmoid softplus log_sigmoid threshold hardshrink softshrink ceil floor round trunc frac
        sign sgn logical_not bitwise_not isnan isinf isfinite nan_to_num clamp clamp_min clamp_max
        clip deg2rad rad2deg lift_fresh_copy _to_copy real
        imag angle conj_physical round.decimals pow.Tensor_Tensor pow.Tensor_Scalar pow.Scalar
        add.Scalar sub.Scalar rsub.Scalar true_divide.Tensor true_divide.Scalar remainder.Tensor
        remainder.Scalar remainder.Scalar_Tensor fmod.Tensor fmod.Scalar to.dtype to.device
        to.dtype_layout fill.Scalar masked_fill.Scalar masked_fill.Tensor where.ScalarOther
        where.ScalarSelf where.Scalar lerp.Scalar lerp.Tensor addcmul addcdiv clamp.Tensor
        clip.Tensor clamp_min.Tensor clamp_max.Tensor div.Tensor_mode div.Scalar_mode maximum
        minimum fmax fmin max.other min.other atan2 hypot polar complex logaddexp logaddexp2
        logical_and logical_or logical_xor heaviside copysign.Tensor nextafter isclose xlogy.Tensor
        floor_divide floor_divide.Scalar eq.Tensor eq.Scalar ne.Tensor ne.Scalar lt.Tensor lt.Scalar
        le.Tensor le.Scalar gt.Tensor gt.Scalar ge.Tensor ge.Scalar not_equal.Tensor
        not_equal.Scalar __and__.Tensor __and__.Scalar __or__.Tensor __or__.Scalar __xor__.Tensor
        __xor__.Scalar bitwise_and.Tensor bitwise_and.Scalar bitwise_or.Tensor bitwise_or.Scalar
        bitwise_xor.Tensor bitwise_xor.Scalar broadcast_tensors
        """,
    ),
    **table(broadcast(), "zeros_like ones_like full_like empty_like", reads="shape"),
    **table(broadcast(), "gelu", elements=75, backward_elements=175),
    **table(broadcast(), "silu", elements=85, backward_elements=125),
    **table(None, "gelu_backward", elements=175),
    **table(None, "silu_backward", elements=125),
    **table(broadcast((0, 1)), "add.Tensor sub.Tensor"),
    **table(broadcast((0,), (1,)), "mul.Tensor"),
    **table(
        broadcast((0,)),
        "mul.Scalar div.Tensor div.Scalar neg positive clone contiguous expand_as",
    ),
    **table(broadcast((0,)), "alias detach", free=True),
    **table(broadcast((1, 2)), "where.self"),
    **table(dropout, "dropout feature_dropout alpha_dropout"),
    DROPOUT: OperatorRow(philox_dropout, elements=DRAWING, backward_elements=DRAWING),
    **table(dtype_of_second, "type_as to.other"),
    **table(prelu, "prelu"),
    **table(glu, "glu"),
    **table(sized, "zeros ones full empty.memory_format"),
    **table(sized, "new_zeros new_ones new_full new_empty", reads="shape"),
    **table(arange, "arange arange.start arange.start_step"),
    **table(lambda call: Rule("-> ()"), "scalar_tensor"),
}
