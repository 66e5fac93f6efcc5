"""Rows of operators that work along dimensions: reductions, softmax, sorting, sums, losses.

    sum over 1        a b+ c -> a c
    softmax over 1    a b^ c -> a b^ c
    topk, 3 of 1      a 9 c -> a 3 c, a 3 c
    amax over 1       a b+ c -> a c, whose partial results are reduced by max
    mean of a loss    a+ b+, a+ b+ -> (), where a part's is weighted by its share of the elements

What mixes a dimension leaves it whole, unless partial results of slices can be put together. The
mean over labels that may be ignored is a quotient of two sums, which no part's program makes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwright.ops.call import (
    CatalogCall,
    Emit,
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
    whole,
)


def mixing(call: CatalogCall) -> Rule:
    """One input and any number of outputs; ``dim`` stays whole."""
    return along(call, call.dims())


def reduction(how: str, emit: Emit | None = None, *, linear: bool = False) -> SplitRule:
    """A rule for a reduction whose partial results are put together by sum, max or min."""

    def rule(call: CatalogCall) -> Rule:
        dims, shape = call.dims(), call.inputs[0]
        names = [
            f"{name}+" if i in dims and name != "1" else name for i, name in enumerate(named(shape))
        ]
        kept = ["1" if i in dims else name for i, name in enumerate(names)]
        if len(call.outputs[0]) < len(shape):
            kept = [name for i, name in enumerate(names) if i not in dims]
        present = ((0,),) if linear else ()
        return Rule(text([names], [kept]), emit=emit, reduction=how, linear=present)

    return rule


def share_of_mean(e: Emitter, local: Local, inputs: Inputs) -> Any:
    """A part's mean, weighted by its share of the elements."""
    mean = e.emit(local.call.op, inputs, local.call.attrs)
    return mean if local.share == 1 else e.call("aten.mul.Tensor", mean, local.share)


def histogram(call: CatalogCall) -> Rule:
    """Counts add up where the bins do not depend on the values."""
    names = named(call.inputs[0])
    bins = [str(call.outputs[0][0])]
    if call.attrs["min"] == call.attrs["max"]:
        return Rule(text([whole(names, set(range(len(names))))], [bins]))
    return Rule(text([[name if name == "1" else f"{name}+" for name in names]], [bins]))


def cosine_similarity(call: CatalogCall) -> Rule:
    """Two inputs of one rank, broadcast; ``dim`` stays whole and is gone."""
    sizes = tuple(map(max, zip(*call.inputs, strict=True)))
    return along(call, {int(call.attrs["dim"]) % len(sizes)}, shape=sizes)


def difference(call: CatalogCall) -> Rule:
    """Neighbours' differences; what is put before or after goes along the same dimension."""
    return along(call, {call.dim()}, linear=(tuple(range(len(call.inputs))),))


# --- losses ---------------------------------------------------------------------------------------

NONE, MEAN, SUM = 0, 1, 2
"""torch's numbers for how a loss is reduced."""


def elementwise_loss(call: CatalogCall) -> Rule:
    """Inputs are broadcast; each element has a loss of its own."""
    rank = max(map(len, call.inputs))
    padded = [(1,) * (rank - len(shape)) + shape for shape in call.inputs]
    full = tuple(map(max, zip(*padded, strict=True)))
    reduced = call.attrs["reduction"] != NONE
    names = named(full, "+" if reduced else "")
    inputs = [aligned(shape, names, full) for shape in call.inputs]
    mean = share_of_mean if call.attrs["reduction"] == MEAN else None
    return Rule(text(inputs, [[] if reduced else names]), emit=mean)


def labelled_loss(call: CatalogCall) -> Rule:
    """Scores of classes against labels: rows split, unless their mean is asked for."""
    scores, target = call.inputs[:2]
    reduction, classes = call.attrs["reduction"], 1 if len(scores) > 1 else 0
    names = named(scores, {NONE: "", MEAN: "^", SUM: "+"}[reduction])
    rows = names[:classes] + names[classes + 1 :]
    names[classes] = str(scores[classes])
    targets = names if len(target) == len(scores) else rows
    weights = [[names[classes]]] * (len(call.inputs) - 2)
    outputs = [rows if reduction == NONE else []] + [[]] * (len(call.outputs) - 1)
    return Rule(text([names, targets, *weights], outputs))


ROWS: Mapping[str, OperatorRow] = {
    **table(
        mixing,
        "softmax.int _softmax _safe_softmax log_softmax.int _log_softmax",
        elements=115,
        backward_elements=115,
    ),
    **table(None, "_softmax_backward_data _log_softmax_backward_data", elements=115),
    **table(
        mixing,
        """
        logsumexp cumsum cumprod
        cummax cummin logcumsumexp sort sort.stable argsort argsort.stable topk kthvalue argmax
        argmin max.dim min.dim median median.dim nanmedian.dim mode prod prod.dim_int var var.dim
        var.correction std std.dim std.correction var_mean.correction std_mean.correction
        linalg_vector_norm norm.ScalarOpt_dim norm.Scalar aminmax
        """,
    ),
    **table(lambda call: along(call, {0}), "msort"),
    **table(reduction("sum", linear=True), "sum sum.dim_IntList nansum"),
    **table(reduction("sum"), "count_nonzero.dim_IntList count_nonzero"),
    **table(reduction("max"), "amax max any any.dim any.dims"),
    **table(reduction("min"), "amin min all all.dim all.dims"),
    **table(reduction("sum", share_of_mean, linear=True), "mean mean.dim"),
    **table(histogram, "histc"),
    **table(cosine_similarity, "cosine_similarity"),
    **table(difference, "diff"),
    **table(
        elementwise_loss,
        """
        mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy
        binary_cross_entropy_with_logits soft_margin_loss poisson_nll_loss kl_div
        """,
    ),
    **table(labelled_loss, "cross_entropy_loss", elements=160, backward_elements=160),
    **table(labelled_loss, "nll_loss nll_loss_nd nll_loss2d"),
}
