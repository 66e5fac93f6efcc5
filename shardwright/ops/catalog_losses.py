"""Rows of losses, by how they are reduced.

    none    a b, a b -> a b
    sum     a+ b+, a+ b+ -> ()
    mean    a+ b+, a+ b+ -> ()     each part's mean weighted by its share of the elements

The mean over labels that may be ignored is a quotient of two sums, which no part's program makes:
`expansions` writes such a loss out in operators that each split.
"""

from __future__ import annotations

import math
from typing import Any

from shardwright.ops.call import Call, Emitter, Inputs, Local, Row, Rule, aligned, named, text
from shardwright.ops.catalog_along import scaled

NONE, MEAN, SUM = 0, 1, 2
"""torch's numbers for how a loss is reduced."""


def elementwise(call: Call) -> Rule:
    """Inputs are broadcast; each element has a loss of its own."""
    rank = max(map(len, call.inputs))
    padded = [(1,) * (rank - len(shape)) + shape for shape in call.inputs]
    full = tuple(map(max, zip(*padded, strict=True)))
    reduced = call.attrs["reduction"] != NONE
    names = named(full, "+" if reduced else "")
    inputs = [aligned(shape, names, full) for shape in call.inputs]
    mean = share_of_mean if call.attrs["reduction"] == MEAN else None
    return Rule(text(inputs, [[] if reduced else names]), emit=mean)


def share_of_mean(e: Emitter, local: Local, inputs: Inputs) -> Any:
    """A part's mean, weighted by its share of the elements."""
    mean = e.emit(local.call.op, inputs, local.call.attrs)
    share = math.prod(cut.length / local.whole_lengths[name] for name, cut in local.cuts.items())
    return scaled(e, mean, share)


def labelled(call: Call) -> Rule:
    """Scores of classes against labels: rows split, unless their mean is asked for."""
    scores, target = call.inputs[:2]
    reduction = call.attrs["reduction"]
    classes = 1 if len(scores) > 1 else 0
    mark = {NONE: "", MEAN: "^", SUM: "+"}[reduction]
    names = named(scores, mark)
    rows = names[:classes] + names[classes + 1 :]
    names[classes] = str(scores[classes])
    targets = names if len(target) == len(scores) else rows
    weights = [[names[classes]]] * (len(call.inputs) - 2)
    outputs = [rows if reduction == NONE else []]
    outputs += [[]] * (len(call.outputs) - 1)
    return Rule(text([names, targets, *weights], outputs))


ROWS: dict[str, Row] = {
    **{
        f"aten.{name}.default": elementwise
        for name in (
            "mse_loss",
            "l1_loss",
            "smooth_l1_loss",
            "huber_loss",
            "binary_cross_entropy",
            "binary_cross_entropy_with_logits",
            "soft_margin_loss",
            "poisson_nll_loss",
            "kl_div",
        )
    },
    "aten.cross_entropy_loss.default": labelled,
    "aten.nll_loss.default": labelled,
    "aten.nll_loss_nd.default": labelled,
    "aten.nll_loss2d.default": labelled,
}
