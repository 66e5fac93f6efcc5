"""Rows of losses: reductions are numbers in ATen and words in Python.

    cross_entropy_loss(x, t, reduction=2)    F.cross_entropy(x, t, reduction="sum")

`F.mse_loss` and its kin expand their operands first, which a graph holds as a call of its own:
they have no rows.
"""

from __future__ import annotations

from shardwright.codegenerate.spelling.arguments import Style
from shardwright.codegenerate.spelling.call import Row
from shardwright.codegenerate.spelling.forms import function

REDUCTIONS = {0: "none", 1: "mean", 2: "sum"}
_WORDS = {"reduction": REDUCTIONS}
_STYLE = Style(front=2, words=_WORDS)

LOSSES = {
    "cross_entropy_loss": "cross_entropy",
    "nll_loss_nd": "nll_loss",
    "binary_cross_entropy": "binary_cross_entropy",
    "binary_cross_entropy_with_logits": "binary_cross_entropy_with_logits",
    "kl_div": "kl_div",
    "hinge_embedding_loss": "hinge_embedding_loss",
    "soft_margin_loss": "soft_margin_loss",
}

ROWS: dict[str, Row] = {
    f"aten.{name}.default": function(f"F.{form}", _STYLE) for name, form in LOSSES.items()
}
ROWS["aten.margin_ranking_loss.default"] = function(
    "F.margin_ranking_loss", Style(front=3, words=_WORDS)
)
