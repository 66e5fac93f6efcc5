"""Samples of losses."""

from __future__ import annotations

from tests.codegenerate.spelling_samples import Sample as S
from tests.codegenerate.spelling_samples import X, Y, f, i

LOGITS, CLASSES, RATES = f(4, 5), i(4, below=5), f(4)
LOSSES = [
    S("cross_entropy_loss.default", (LOGITS, CLASSES), "F.cross_entropy(a, b)"),
    S(
        "cross_entropy_loss.default",
        (LOGITS, CLASSES, None, 2),
        'F.cross_entropy(a, b, reduction="sum")',
    ),
    S(
        "cross_entropy_loss.default",
        (LOGITS, CLASSES, f(5), 0, 3, 0.1),
        'F.cross_entropy(a, b, weight=c, reduction="none", ignore_index=3, label_smoothing=0.1)',
    ),
    S("nll_loss_nd.default", (LOGITS, CLASSES), "F.nll_loss(a, b)"),
    S("nll_loss_nd.default", (LOGITS, CLASSES, None, 2), 'F.nll_loss(a, b, reduction="sum")'),
    S("binary_cross_entropy.default", (f(4), f(4)), "F.binary_cross_entropy(a, b)"),
    S(
        "binary_cross_entropy_with_logits.default",
        (RATES, RATES, None, RATES),
        "F.binary_cross_entropy_with_logits(a, b, pos_weight=c)",
    ),
    S("kl_div.default", (X, Y, 2), 'F.kl_div(a, b, reduction="sum")'),
    S(
        "kl_div.default",
        (X, Y, 0),
        'F.kl_div(a, b, reduction="none", log_target=True)',
        {"log_target": True},
    ),
    S("hinge_embedding_loss.default", (X, Y), "F.hinge_embedding_loss(a, b)"),
    S("margin_ranking_loss.default", (RATES, RATES, RATES), "F.margin_ranking_loss(a, b, c)"),
    S("soft_margin_loss.default", (X, Y), "F.soft_margin_loss(a, b)"),
    S("mse_loss.default", (X, Y, 2), "torch.ops.aten.mse_loss.default(a, b, reduction=2)"),
]
