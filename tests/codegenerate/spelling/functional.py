"""Samples of norms, attention, dropout and recurrent layers."""

from __future__ import annotations

from tests.codegenerate.spelling_samples import IMAGE, X, b, f
from tests.codegenerate.spelling_samples import Sample as S

FUNCTIONAL = [
    S("layer_norm.default", (X, [4]), "F.layer_norm(a, (4,))"),
    S("layer_norm.default", (X, [4], f(4), f(4)), "F.layer_norm(a, (4,), b, c)"),
    S(
        "layer_norm.default",
        (X, [3, 4], f(3, 4), None, 1e-6),
        "F.layer_norm(a, (3, 4), b, eps=1e-06)",
    ),
    S("layer_norm.default", (X, [4], None, f(4)), "F.layer_norm(a, (4,), bias=b)"),
    S("rms_norm.default", (X, [4], f(4), 1e-6), "F.rms_norm(a, (4,), b, eps=1e-06)"),
    S("group_norm.default", (IMAGE, 2, f(4), f(4)), "F.group_norm(a, 2, b, c)"),
    S(
        "batch_norm.default",
        (IMAGE, f(4), f(4), f(4), f(4), False, 0.1, 1e-5, False),
        "F.batch_norm(a, d, e, b, c, training=self.training)",
    ),
    S(
        "batch_norm.default",
        (IMAGE, None, None, None, None, True, 0.1, 1e-5, False),
        "F.batch_norm(a, None, None, training=True)",
    ),
    S(
        "batch_norm.default",
        (IMAGE, None, None, f(4), f(4), False, 0.2, 1e-3, True),
        "F.batch_norm(a, b, c, momentum=0.2, eps=0.001)",
        training=True,
    ),
    S(
        "instance_norm.default",
        (IMAGE, f(4), f(4), None, None, True, 0.1, 1e-5, False),
        "F.instance_norm(a, weight=b, bias=c)",
    ),
    S(
        "native_layer_norm.default",
        (X, [4], f(4), f(4), 1e-5),
        "torch.native_layer_norm(a, (4,), b, c, 1e-05)",
    ),
    S(
        "scaled_dot_product_attention.default",
        (f(2, 2, 3, 4), f(2, 2, 3, 4), f(2, 2, 3, 4)),
        "F.scaled_dot_product_attention(a, b, c)",
    ),
    S(
        "scaled_dot_product_attention.default",
        (f(2, 2, 3, 4), f(2, 2, 3, 4), f(2, 2, 3, 4), None, 0.0, True),
        "F.scaled_dot_product_attention(a, b, c, is_causal=True)",
    ),
    S(
        "scaled_dot_product_attention.default",
        (f(2, 2, 3, 4), f(2, 2, 3, 4), f(2, 2, 3, 4), b(2, 1, 3, 3), 0.0),
        "F.scaled_dot_product_attention(a, b, c, attn_mask=d, scale=0.5)",
        {"scale": 0.5},
    ),
    S(
        "scaled_dot_product_attention.default",
        (f(2, 4, 3, 4), f(2, 2, 3, 4), f(2, 2, 3, 4)),
        "F.scaled_dot_product_attention(a, b, c, enable_gqa=True)",
        {"enable_gqa": True},
    ),
    S(
        "scaled_dot_product_attention.default",
        (f(2, 2, 3, 4), f(2, 2, 3, 4), f(2, 2, 3, 4), None, 0.1),
        "F.scaled_dot_product_attention(a, b, c, dropout_p=0.1 if self.training else 0.0)",
        training=True,
    ),
    S(
        "scaled_dot_product_attention.default",
        (f(2, 2, 3, 4), f(2, 2, 3, 4), f(2, 2, 3, 4), None, 0.1),
        "F.scaled_dot_product_attention(a, b, c, dropout_p=0.1)",
    ),
    S(
        "dropout.default",
        (X, 0.1, True),
        "F.dropout(a, 0.1, training=self.training)",
        training=True,
    ),
    S("dropout.default", (X, 0.1, True), "F.dropout(a, 0.1)"),
    *(
        S(
            f"{name}.default",
            (X, 0.1, True),
            f"F.{name}(a, 0.1, training={flag})",
            training=training,
        )
        for name in ("alpha_dropout", "feature_alpha_dropout")
        for training, flag in ((True, "self.training"), (False, "True"))
    ),
    S(
        "feature_dropout.default",
        (X, 0.1, True),
        "F.dropout1d(a, 0.1, training=self.training)",
        training=True,
    ),
    S(
        "feature_dropout.default",
        (IMAGE, 0.1, True),
        "F.dropout2d(a, 0.1, training=self.training)",
        training=True,
    ),
    S(
        "feature_dropout.default",
        (f(2, 3), 0.1, True),
        "torch.ops.aten.feature_dropout.default(a, 0.1, True)",
        training=True,
    ),
    S(
        "lstm.input",
        (
            f(3, 2, 4),
            [f(1, 2, 5), f(1, 2, 5)],
            [f(20, 4), f(20, 5)],
            False,
            1,
            0.0,
            False,
            False,
            False,
        ),
        "torch.lstm(a, [b, c], [d, e], False, 1, 0.0, self.training, False, False)",
    ),
    *(
        S(
            f"{name}.input",
            (f(3, 2, 4), f(1, 2, 5), [f(5, 4), f(5, 5)], False, 1, 0.0, False, False, False),
            f"torch.{name}(a, b, [c, d], False, 1, 0.0, self.training, False, False)",
        )
        for name in ("rnn_tanh", "rnn_relu")
    ),
    S(
        "gru.input",
        (f(3, 2, 4), f(1, 2, 5), [f(15, 4), f(15, 5)], False, 1, 0.0, False, False, False),
        "torch.gru(a, b, [c, d], False, 1, 0.0, self.training, False, False)",
    ),
]
