"""Rows of `torch.nn.functional`: layers, normalization, pooling, resizing, attention, dropout.

linear(x, w, b)                            F.linear(x, w, b)
layer_norm(x, [768], w, b, 1e-6)           F.layer_norm(x, (768,), w, b, eps=1e-06)
dropout(x, 0.1, True), in training         F.dropout(x, 0.1, training=self.training)
scaled_dot_product_attention(…, p=0.1)     dropout_p=0.1 if self.training else 0.0
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwright.codegenerate.expression import Expression
from shardwright.codegenerate.spelling.arguments import ALWAYS, Style, arguments
from shardwright.codegenerate.spelling.call import Call, Row
from shardwright.codegenerate.spelling.forms import function, words

FUNCTIONS = words("""
    linear.default rms_norm.default
    conv1d.default conv2d.default conv3d.default
    conv_transpose1d.default conv_transpose2d.input conv_transpose3d.input
    max_pool1d.default max_pool2d.default max_pool3d.default
    avg_pool1d.default avg_pool2d.default avg_pool3d.default
    adaptive_avg_pool1d.default adaptive_avg_pool2d.default adaptive_avg_pool3d.default
""")

WITH_INDICES = {
    "max_pool1d_with_indices": "max_pool1d",
    "max_pool2d_with_indices": "max_pool2d",
    "max_pool3d_with_indices": "max_pool3d",
    "adaptive_max_pool1d": "adaptive_max_pool1d",
    "adaptive_max_pool2d": "adaptive_max_pool2d",
    "adaptive_max_pool3d": "adaptive_max_pool3d",
}
"""Pools that give the places of the maxima too, and Python's functions for them."""


def with_indices(name: str) -> Row:
    """``F.max_pool2d(x, 2, return_indices=True)``."""

    def row(call: Call) -> Expression:
        parts = [*(arguments(call, Style()) or []), "return_indices=True"]
        return Expression(f"F.{name}({', '.join(parts)})")

    return row


# --- normalization ------------------------------------------------------------------------------


def statistical_norm(name: str, flag: str, passed: Mapping[str, Any]) -> Row:
    """Norms whose ``flag`` says to use the batch's statistics and not those that are kept.

    Where some are kept, the flag is the mode's.
    """
    style: dict[str, Any] = {
        "order": ("input", *_KEPT, "weight", "bias", flag, "momentum", "eps"),
        "defaults": {"weight": None, "bias": None, "momentum": 0.1, "eps": 1e-5, **passed},
        "settings": ("cudnn_enabled",),
    }
    rows = {
        kept: function(name, Style(**style, flags=(flag,) if kept else ()))
        for kept in (False, True)
    }
    return lambda call: rows[call.has("running_mean")](call)


_KEPT = ("running_mean", "running_var")

# --- what is random -----------------------------------------------------------------------------


def dropout(name: str, *, default: bool = True) -> Row:
    """``F.dropout(x, 0.1, training=self.training)``; ``default`` is that of ``training``."""
    style = Style(
        front=2, defaults={"train": default}, flags=("train",), rename={"train": "training"}
    )
    return function(f"F.{name}", style)


_FEATURES = {3: dropout("dropout1d"), 4: dropout("dropout2d"), 5: dropout("dropout3d")}


def feature_dropout(call: Call) -> Expression | None:
    """``F.dropout2d(x, 0.1)``, named by the number of dimensions."""
    row = _FEATURES.get(len(call.operand("input").value.shape))
    return None if row is None else row(call)


def attention(call: Call) -> Expression | None:
    """``F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0)``."""
    parts = arguments(call, Style(front=3))
    assert parts is not None
    p = call.arguments["dropout_p"]
    if p > 0 and call.mode.training and call.mode.in_module:
        given = f"dropout_p={p}"
        parts[parts.index(given)] = f"{given} if self.training else 0.0"
    return Expression(f"F.scaled_dot_product_attention({', '.join(parts)})")


# --- resizing -----------------------------------------------------------------------------------

_MODES = {
    **{f"upsample_nearest{n}d.vec": "nearest" for n in (1, 2, 3)},
    **{f"_upsample_nearest_exact{n}d.vec": "nearest-exact" for n in (1, 2, 3)},
    "upsample_linear1d.vec": "linear",
    "upsample_bilinear2d.vec": "bilinear",
    "upsample_bicubic2d.vec": "bicubic",
    "upsample_trilinear3d.vec": "trilinear",
    "_upsample_bilinear2d_aa.vec": "bilinear",
    "_upsample_bicubic2d_aa.vec": "bicubic",
}


def interpolate(name: str, mode: str) -> Row:
    """``F.interpolate(x, scale_factor=(2.0, 2.0), mode="bilinear")``."""
    style = Style(
        front=1,
        defaults={"output_size": None, "align_corners": False, "scale_factors": None},
        rename={"output_size": "size", "scale_factors": "scale_factor"},
    )
    said = [] if mode == "nearest" else [f'mode="{mode}"']
    said += ["antialias=True"] if "_aa" in name else []

    def row(call: Call) -> Expression:
        parts = [*(arguments(call, style) or []), *said]
        return Expression(f"F.interpolate({', '.join(parts)})")

    return row


_GRID = Style(
    front=2,
    rename={"interpolation_mode": "mode"},
    defaults={"interpolation_mode": 0, "padding_mode": 0},
    words={
        "interpolation_mode": {0: "bilinear", 1: "nearest", 2: "bicubic"},
        "padding_mode": {0: "zeros", 1: "border", 2: "reflection"},
    },
)

ROWS: dict[str, Row] = {
    **{f"aten.{name}": function(f"F.{name.partition('.')[0]}") for name in FUNCTIONS},
    **{
        f"aten.conv{n}d.padding": function(f"F.conv{n}d", Style(defaults={"padding": ALWAYS}))
        for n in (1, 2, 3)
    },
    **{f"aten.{name}.default": with_indices(form) for name, form in WITH_INDICES.items()},
    **{f"aten.{name}": interpolate(name, mode) for name, mode in _MODES.items()},
    "aten.layer_norm.default": function("F.layer_norm", Style(settings=("cudnn_enable",))),
    "aten.group_norm.default": function("F.group_norm", Style(settings=("cudnn_enabled",))),
    "aten.batch_norm.default": statistical_norm("F.batch_norm", "training", {"training": False}),
    "aten.instance_norm.default": statistical_norm(
        "F.instance_norm",
        "use_input_stats",
        {"use_input_stats": True, "running_mean": None, "running_var": None},
    ),
    "aten.convolution.default": function("torch.convolution", Style(brackets=True)),
    "aten.native_layer_norm.default": function("torch.native_layer_norm"),
    "aten.scaled_dot_product_attention.default": attention,
    "aten.dropout.default": dropout("dropout"),
    "aten.alpha_dropout.default": dropout("alpha_dropout", default=False),
    "aten.feature_alpha_dropout.default": dropout("feature_alpha_dropout", default=False),
    "aten.feature_dropout.default": feature_dropout,
    "aten.grid_sampler.default": function("F.grid_sample", _GRID),
    "aten.lstm.input": function("torch.lstm", Style(flags=("train",))),
    "aten.gru.input": function("torch.gru", Style(flags=("train",))),
    "aten.rnn_tanh.input": function("torch.rnn_tanh", Style(flags=("train",))),
    "aten.rnn_relu.input": function("torch.rnn_relu", Style(flags=("train",))),
}
