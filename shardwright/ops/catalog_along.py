"""Rows of operators that work along dimensions: reductions, softmax, sorting, running sums.

    sum over 1        a b+ c -> a c
    softmax over 1    a b^ c -> a b^ c
    topk, 3 of 1      a 9 c -> a 3 c, a 3 c
    amax over 1       a b+ c -> a c, whose partial results are reduced by max

What mixes a dimension leaves it whole, unless partial results of slices can be put together.
"""

from __future__ import annotations

import math
from typing import Any

from shardwright.ops.call import (
    Call,
    Dims,
    Emitter,
    Inputs,
    Local,
    Row,
    Rule,
    named,
    text,
    whole,
    words,
)


def along(call: Call, dims: set[int], outputs: int = 1) -> Rule:
    """``dims`` stay whole; in each output they have their size, another one, or are gone."""
    shape = call.inputs[0]
    names = whole(named(shape), dims)
    made = [output_dims(call, index, names, dims) for index in range(outputs)]
    if any(str(size) in output for output in made for size in (shape[d] for d in dims)):
        names = [str(shape[i]) if i in dims else name for i, name in enumerate(names)]
    return Rule(text([names], made))


def output_dims(call: Call, index: int, names: Dims, dims: set[int]) -> Dims:
    """The names of an output, given those of the first input and the dimensions worked along."""
    shape, full = call.inputs[0], call.outputs[index]
    if len(full) < len(shape):
        return [name for i, name in enumerate(names) if i not in dims]
    return [
        name if i not in dims or full[i] == shape[i] else str(full[i])
        for i, name in enumerate(names)
    ]


def mixing(call: Call) -> Rule:
    """One input and any number of outputs; ``dim`` stays whole."""
    return along(call, call.dims(), len(call.outputs))


def reduction(how: str, emit: Any = None) -> Row:
    """A row for a reduction whose partial results are put together by sum, max or min."""

    def row(call: Call) -> Rule:
        dims = call.dims()
        shape = call.inputs[0]
        names = [
            f"{name}+" if i in dims and name != "1" else name for i, name in enumerate(named(shape))
        ]
        kept = ["1" if i in dims else name for i, name in enumerate(names)]
        if len(call.outputs[0]) < len(shape):
            kept = [name for i, name in enumerate(names) if i not in dims]
        linear = ((0,),) if how == "sum" and call.op not in NOT_LINEAR else ()
        return Rule(text([names], [kept]), emit=emit, reduction=how, linear=linear)

    return row


NOT_LINEAR = {"aten.count_nonzero.dim_IntList", "aten.count_nonzero.default"}


def share_of_mean(e: Emitter, local: Local, inputs: Inputs) -> Any:
    """A part's mean, weighted by how much of the whole it is the mean of."""
    mean = e.emit(local.call.op, inputs, local.call.attrs)
    return scaled(e, mean, averaged(local) / averaged_whole(local))


def averaged(local: Local) -> int:
    """How many elements of a part go into one mean."""
    shape = local.inputs[0]
    assert shape is not None
    return math.prod(shape[dim] for dim in local.call.dims())


def averaged_whole(local: Local) -> int:
    """How many elements of the whole go into one mean."""
    return math.prod(local.call.inputs[0][dim] for dim in local.call.dims())


def scaled(e: Emitter, value: Any, factor: float) -> Any:
    """A value times a number."""
    return value if factor == 1 else e.call("aten.mul.Tensor", value, factor)


def histogram(call: Call) -> Rule:
    """Counts add up where the bins do not depend on the values."""
    names = named(call.inputs[0])
    bins = [str(call.outputs[0][0])]
    if call.attrs["min"] == call.attrs["max"]:
        return Rule(text([whole(names, set(range(len(names))))], [bins]))
    summed = [name if name == "1" else f"{name}+" for name in names]
    return Rule(text([summed], [bins]))


def cosine_similarity(call: Call) -> Rule:
    """Two inputs of one rank, broadcast; ``dim`` stays whole and is gone."""
    sizes = tuple(map(max, zip(*call.inputs, strict=True)))
    dim = int(call.attrs["dim"]) % len(sizes)
    names = whole(named(sizes), {dim})
    inputs = [
        ["1" if size == 1 else name for size, name in zip(shape, names, strict=True)]
        for shape in call.inputs
    ]
    return Rule(text(inputs, [names[:dim] + names[dim + 1 :]]))


def difference(call: Call) -> Rule:
    """Neighbours' differences; what is put before or after goes along the same dimension."""
    dim = call.dim()
    names = named(call.inputs[0])

    def dims(shape: tuple[int, ...]) -> Dims:
        return [str(shape[i]) if i == dim else name for i, name in enumerate(names)]

    inputs = [dims(shape) for shape in call.inputs]
    return Rule(text(inputs, [dims(call.outputs[0])]), linear=(tuple(range(len(inputs))),))


MIXING = words("""
    softmax.int _softmax.default log_softmax.int _log_softmax.default logsumexp.default
    cumsum.default cumprod.default cummax.default cummin.default logcumsumexp.default sort.default
    sort.stable argsort.default argsort.stable topk.default kthvalue.default argmax.default
    argmin.default max.dim min.dim median.dim nanmedian.dim mode.default prod.default prod.dim_int
    var.correction std.correction var.dim std.dim var.default std.default var_mean.correction
    std_mean.correction linalg_vector_norm.default norm.ScalarOpt_dim norm.Scalar aminmax.default
    median.default _safe_softmax.default
""")

ROWS: dict[str, Row] = {
    **{f"aten.{name}": mixing for name in MIXING},
    "aten.msort.default": lambda call: along(call, {0}),
    **{
        f"aten.{name}": reduction("sum")
        for name in (
            "sum.default",
            "sum.dim_IntList",
            "nansum.default",
            "count_nonzero.dim_IntList",
            "count_nonzero.default",
        )
    },
    **{
        f"aten.{name}": reduction("max")
        for name in ("amax.default", "max.default", "any.default", "any.dim", "any.dims")
    },
    **{
        f"aten.{name}": reduction("min")
        for name in ("amin.default", "min.default", "all.default", "all.dim", "all.dims")
    },
    "aten.mean.default": reduction("sum", share_of_mean),
    "aten.mean.dim": reduction("sum", share_of_mean),
    "aten.histc.default": histogram,
    "aten.cosine_similarity.default": cosine_similarity,
    "aten.diff.default": difference,
}
