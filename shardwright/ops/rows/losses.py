"""Rows of losses, by how they are reduced.

    none    a b, a b -> a b
    sum     a+ b+, a+ b+ -> ()
    mean    a+ b+, a+ b+ -> ()     each part's mean weighted by its share of the elements

The mean over labels that may be ignored is a quotient of two sums, which no part's program makes.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.ops.call import CatalogCall, OperatorRow, Rule, aligned, named, table, text
from shardwright.ops.rows.reductions import share_of_mean

NONE, MEAN, SUM = 0, 1, 2
"""torch's numbers for how a loss is reduced."""


def elementwise(call: CatalogCall) -> Rule:
    """Inputs are broadcast; each element has a loss of its own."""
    rank = max(map(len, call.inputs))
    padded = [(1,) * (rank - len(shape)) + shape for shape in call.inputs]
    full = tuple(map(max, zip(*padded, strict=True)))
    reduced = call.attrs["reduction"] != NONE
    names = named(full, "+" if reduced else "")
    inputs = [aligned(shape, names, full) for shape in call.inputs]
    mean = share_of_mean if call.attrs["reduction"] == MEAN else None
    return Rule(text(inputs, [[] if reduced else names]), emit=mean)


def labelled(call: CatalogCall) -> Rule:
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
        elementwise,
        """
        mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy
        binary_cross_entropy_with_logits soft_margin_loss poisson_nll_loss kl_div
        """,
    ),
    **table(labelled, "cross_entropy_loss", elements=160, backward_elements=160),
    **table(labelled, "nll_loss nll_loss_nd nll_loss2d"),
}
