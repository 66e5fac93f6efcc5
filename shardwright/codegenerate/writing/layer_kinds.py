"""The layers of torch.nn that a module's one node can be: one row a class and operator.

Comes in: a node of a module, its arguments by the schema's names. Goes out: the arguments of the
constructor whose layer, called, is captured as that very node; None where there is none.

    Linear       linear(x, weight f32[4, 3])                       3, 4, bias=False
    Conv2d       conv2d(x, weight f32[8, 3, 7, 7], bias, [2, 2])   3, 8, kernel_size=7, stride=2
    GELU         gelu(x, approximate="tanh")                       approximate="tanh"
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.codegenerate.writing.layer_arguments import (
    Write,
    batch_norm,
    bilinear,
    by_place,
    convolution,
    dropout,
    embedding,
    group_norm,
    instance_norm,
    layer_norm,
    linear,
    loss,
    padding,
    plain,
    pool,
    relu6,
    rms_norm,
    transposed,
    unflatten,
)


@dataclass(frozen=True, slots=True)
class Kind:
    """A class of layers whose call is the one node ``op``; ``own`` are arguments that it stores."""

    cls: str
    op: str
    write: Write
    own: tuple[str, ...] = ()


WEIGHT = ("weight",)
AFFINE = ("weight", "bias")
STATISTICS = ("running_mean", "running_var")
MODE_FLAGS = ("train", "training", "use_input_stats")
"""What operators call the mode that their layer is in."""

_MAX_POOL = pool(padding=0, dilation=1, ceil_mode=False)
_AVG_POOL = pool(padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None)

KINDS: tuple[Kind, ...] = (
    Kind("Linear", "aten.linear.default", linear, AFFINE),
    Kind("Bilinear", "aten.bilinear.default", bilinear, AFFINE),
    Kind("Embedding", "aten.embedding.default", embedding, WEIGHT),
    *(Kind(f"Conv{n}d", f"aten.conv{n}d.default", convolution, AFFINE) for n in (1, 2, 3)),
    *(Kind(f"Conv{n}d", f"aten.conv{n}d.padding", convolution, AFFINE) for n in (1, 2, 3)),
    Kind("ConvTranspose1d", "aten.conv_transpose1d.default", transposed, AFFINE),
    Kind("ConvTranspose2d", "aten.conv_transpose2d.input", transposed, AFFINE),
    Kind("ConvTranspose3d", "aten.conv_transpose3d.input", transposed, AFFINE),
    Kind("LayerNorm", "aten.layer_norm.default", layer_norm, AFFINE),
    Kind("RMSNorm", "aten.rms_norm.default", rms_norm, WEIGHT),
    Kind("GroupNorm", "aten.group_norm.default", group_norm, AFFINE),
    Kind("BatchNorm1d", "aten.batch_norm.default", batch_norm(2, 3), AFFINE + STATISTICS),
    Kind("BatchNorm2d", "aten.batch_norm.default", batch_norm(4), AFFINE + STATISTICS),
    Kind("BatchNorm3d", "aten.batch_norm.default", batch_norm(5), AFFINE + STATISTICS),
    *(
        Kind(
            f"InstanceNorm{n}d",
            "aten.instance_norm.default",
            instance_norm(n + 2),
            AFFINE + STATISTICS,
        )
        for n in (1, 2, 3)
    ),
    Kind("PReLU", "aten.prelu.default", lambda part: [str(part.shape("weight")[0])], WEIGHT),
    Kind("Dropout", "aten.dropout.default", dropout),
    *(Kind(f"Dropout{n}d", "aten.feature_dropout.default", dropout) for n in (1, 2, 3)),
    Kind("AlphaDropout", "aten.alpha_dropout.default", dropout),
    Kind("FeatureAlphaDropout", "aten.feature_alpha_dropout.default", dropout),
    Kind("ReLU", "aten.relu.default", plain()),
    Kind("ReLU6", "aten.relu6.default", plain()),
    Kind("ReLU6", "aten.hardtanh.default", relu6),
    Kind("GELU", "aten.gelu.default", plain(approximate="none")),
    Kind("SiLU", "aten.silu.default", plain()),
    Kind("Mish", "aten.mish.default", plain()),
    Kind("Tanh", "aten.tanh.default", plain()),
    Kind("Sigmoid", "aten.sigmoid.default", plain()),
    Kind("LogSigmoid", "aten.log_sigmoid.default", plain()),
    Kind("Hardswish", "aten.hardswish.default", plain()),
    Kind("Hardsigmoid", "aten.hardsigmoid.default", plain()),
    Kind("SELU", "aten.selu.default", plain()),
    Kind("ELU", "aten.elu.default", plain(alpha=1.0)),
    Kind("CELU", "aten.celu.default", plain(alpha=1.0)),
    Kind("LeakyReLU", "aten.leaky_relu.default", plain(negative_slope=0.01)),
    Kind("Hardtanh", "aten.hardtanh.default", plain(min_val=-1.0, max_val=1.0)),
    Kind("Softplus", "aten.softplus.default", plain(beta=1.0, threshold=20.0)),
    Kind("Threshold", "aten.threshold.default", by_place("threshold", "value")),
    Kind("Hardshrink", "aten.hardshrink.default", plain(lambd=0.5)),
    Kind("Softshrink", "aten.softshrink.default", plain(lambd=0.5)),
    Kind("GLU", "aten.glu.default", plain(dim=-1)),
    Kind("Softmax", "aten.softmax.int", plain(dim=None)),
    Kind("LogSoftmax", "aten.log_softmax.int", plain(dim=None)),
    Kind("Flatten", "aten.flatten.using_ints", plain(start_dim=1, end_dim=-1)),
    Kind("Unflatten", "aten.unflatten.int", unflatten),
    Kind("PixelShuffle", "aten.pixel_shuffle.default", by_place("upscale_factor")),
    Kind("PixelUnshuffle", "aten.pixel_unshuffle.default", by_place("downscale_factor")),
    Kind("ChannelShuffle", "aten.channel_shuffle.default", by_place("groups")),
    Kind("CosineSimilarity", "aten.cosine_similarity.default", plain(dim=1, eps=1e-8)),
    *(Kind(f"MaxPool{n}d", f"aten.max_pool{n}d.default", _MAX_POOL) for n in (1, 2, 3)),
    Kind(
        "AvgPool1d",
        "aten.avg_pool1d.default",
        pool(padding=0, ceil_mode=False, count_include_pad=True),
    ),
    *(Kind(f"AvgPool{n}d", f"aten.avg_pool{n}d.default", _AVG_POOL) for n in (2, 3)),
    *(
        Kind(f"AdaptiveAvgPool{n}d", f"aten.adaptive_avg_pool{n}d.default", by_place("output_size"))
        for n in (1, 2, 3)
    ),
    *(
        Kind(f"{cls}Pad{n}d", "aten.pad.default", write)
        for n in (1, 2, 3)
        for cls, write in (
            ("Zero", padding("constant")),
            ("Constant", padding("constant", valued=True)),
            ("Reflection", padding("reflect")),
            ("Replication", padding("replicate")),
            ("Circular", padding("circular")),
        )
    ),
    Kind(
        "CrossEntropyLoss",
        "aten.cross_entropy_loss.default",
        loss(ignore_index=-100, label_smoothing=0.0),
    ),
    Kind("NLLLoss", "aten.nll_loss_nd.default", loss(ignore_index=-100)),
    Kind("BCELoss", "aten.binary_cross_entropy.default", loss()),
    Kind("BCEWithLogitsLoss", "aten.binary_cross_entropy_with_logits.default", loss()),
    Kind("KLDivLoss", "aten.kl_div.default", loss(log_target=False)),
)

BROADCAST_LOSSES: Mapping[str, Kind] = {
    kind.op: kind
    for kind in (
        Kind("MSELoss", "aten.mse_loss.default", loss()),
        Kind("L1Loss", "aten.l1_loss.default", loss()),
        Kind("SmoothL1Loss", "aten.smooth_l1_loss.default", loss(beta=1.0)),
        Kind("HuberLoss", "aten.huber_loss.default", loss(delta=1.0)),
    )
}
"""Losses that broadcast their operands first, which is a node of its own."""
