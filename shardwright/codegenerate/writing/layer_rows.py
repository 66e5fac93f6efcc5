"""The layers of torch.nn that a module's one node can be: one row a class and operator.

Linear       linear(x, weight f32[4, 3])                       3, 4, bias=False
Conv2d       conv2d(x, weight f32[8, 3, 7, 7], bias, [2, 2])   3, 8, kernel_size=7, stride=2
GELU         gelu(x, approximate="tanh")                       approximate="tanh"
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shardwright.codegenerate.spelling.forms import parameters
from shardwright.codegenerate.spelling.literals import listed, literal
from shardwright.codegenerate.spelling.table import REDUCTIONS
from shardwright.ir import IRNode, IRValue, resolve
from shardwright.ir.operators import named_arguments


@dataclass(frozen=True, slots=True)
class Part:
    """A node of a module: its arguments by the schema's names, tensors as values."""

    node: IRNode
    arguments: Mapping[str, Any]

    @classmethod
    def of(cls, node: IRNode, values: Mapping[int, IRValue]) -> Part:
        """The node's call."""
        inputs = [values[i] for i in node.inputs]
        return cls(node, named_arguments(resolve(node.op), inputs, node.attrs))

    def has(self, name: str) -> bool:
        """Whether the argument ``name`` is a tensor."""
        return isinstance(self.arguments[name], IRValue)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the tensor ``name``."""
        value = self.arguments[name]
        assert isinstance(value, IRValue)
        return value.shape

    def is_plain(self, *said: str) -> bool:
        """Whether every number but those ``said`` is the schema's default."""
        return all(
            slot.name in said or self.has(slot.name) or self.arguments[slot.name] == slot.default
            for slot in parameters(self.node.op)
        )


# --- texts --------------------------------------------------------------------------------------


def short(value: Any) -> str:
    """A value's literal; one number for a list of equal ones."""
    if not isinstance(value, list):
        return literal(value)
    if value and value.count(value[0]) == len(value):
        return literal(value[0])
    return listed([literal(item) for item in value])


def unlike(part: Part, defaults: Mapping[str, Any]) -> list[str]:
    """``stride=2`` for each argument that is not the constructor's default."""
    return [
        f"{name}={short(part.arguments[name])}"
        for name, default in defaults.items()
        if short(part.arguments[name]) != short(default)
    ]


def unless(condition: bool, text: str) -> list[str]:
    """The text, where the condition does not hold."""
    return [] if condition else [text]


def affine(part: Part, name: str = "affine") -> list[str] | None:
    """``bias=False``, ``affine=False``; None for a bias alone, which no layer has."""
    if part.has("weight"):
        return unless(part.has("bias"), "bias=False")
    return None if part.has("bias") else [f"{name}=False"]


Write = Callable[[Part], list[str] | None]
"""What writes them for layers of one class."""

# --- products -----------------------------------------------------------------------------------


def linear(part: Part) -> list[str] | None:
    """``3, 4``: features in and out."""
    weight = part.shape("weight")
    if len(weight) != 2:
        return None
    return [str(weight[1]), str(weight[0]), *unless(part.has("bias"), "bias=False")]


def bilinear(part: Part) -> list[str] | None:
    """``2, 3, 4``: features of both inputs and of the output."""
    out, first, second = part.shape("weight")
    return [str(first), str(second), str(out), *unless(part.has("bias"), "bias=False")]


def embedding(part: Part) -> list[str] | None:
    """``50257, 768, padding_idx=0``."""
    defaults = {"padding_idx": -1, "scale_grad_by_freq": False, "sparse": False}
    return [*map(str, part.shape("weight")), *unlike(part, defaults)]


def convolution(part: Part) -> list[str] | None:
    """``3, 64, kernel_size=7, stride=2, bias=False``."""
    out, into, *kernel = part.shape("weight")
    defaults = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
    return _convolution(part, into * part.arguments["groups"], out, kernel, defaults)


def transposed(part: Part) -> list[str] | None:
    """``64, 3, kernel_size=4, stride=2``."""
    into, out, *kernel = part.shape("weight")
    defaults = {"stride": 1, "padding": 0, "output_padding": 0, "groups": 1, "dilation": 1}
    return _convolution(part, into, out * part.arguments["groups"], kernel, defaults)


def _convolution(
    part: Part, into: int, out: int, kernel: list[int], defaults: Mapping[str, Any]
) -> list[str] | None:
    lists = [part.arguments[name] for name in defaults if name != "groups"]
    if any(isinstance(item, list) and len(item) != len(kernel) for item in lists):
        return None
    size = f"kernel_size={short(kernel)}"
    bias = unless(part.has("bias"), "bias=False")
    return [str(into), str(out), size, *unlike(part, defaults), *bias]


# --- normalization ------------------------------------------------------------------------------


def layer_norm(part: Part) -> list[str] | None:
    """``768, eps=1e-06``."""
    rest = affine(part, "elementwise_affine")
    if rest is None:
        return None
    return [_normalized(part), *unlike(part, {"eps": 1e-5}), *rest]


def rms_norm(part: Part) -> list[str] | None:
    """``768, eps=1e-06``."""
    rest = unless(part.has("weight"), "elementwise_affine=False")
    return [_normalized(part), *unlike(part, {"eps": None}), *rest]


def _normalized(part: Part) -> str:
    shape = part.arguments["normalized_shape"]
    return str(shape[0]) if len(shape) == 1 else listed([str(size) for size in shape])


def group_norm(part: Part) -> list[str] | None:
    """``32, 128``: groups and channels."""
    rest = affine(part)
    if rest is None:
        return None
    sizes = [str(part.arguments["num_groups"]), str(part.shape("input")[1])]
    return [*sizes, *unlike(part, {"eps": 1e-5}), *rest]


def batch_norm(*ranks: int) -> Write:
    """``64, momentum=0.01``, of inputs of so many dimensions."""

    def write(part: Part) -> list[str] | None:
        tracked = part.has("running_mean")
        if part.arguments["training"] == tracked or len(part.shape("input")) not in ranks:
            return None
        return statistical(part, tracked, affine(part), ["track_running_stats=False"])

    return write


def instance_norm(*ranks: int) -> Write:
    """``64, affine=True``: unlike batch norms, plain unless it is said."""

    def write(part: Part) -> list[str] | None:
        tracked = part.has("running_mean")
        if part.arguments["use_input_stats"] == tracked or len(part.shape("input")) not in ranks:
            return None
        own = {"bias=False": ["affine=True", "bias=False"], "affine=False": []}
        rest = affine(part)
        if rest is not None:
            rest = own[rest[0]] if rest else ["affine=True"]
        return statistical(part, not tracked, rest, ["track_running_stats=True"])

    return write


def statistical(
    part: Part, usual: bool, rest: list[str] | None, tracks: list[str]
) -> list[str] | None:
    """``64, eps=0.001``; ``tracks`` where it is not ``usual`` whether statistics are kept."""
    if rest is None:
        return None
    said = [*unlike(part, {"eps": 1e-5, "momentum": 0.1}), *rest]
    return [str(part.shape("input")[1]), *said, *([] if usual else tracks)]


# --- layers without parameters ------------------------------------------------------------------


def plain(**defaults: Any) -> Write:
    """Numbers under the schema's own names, and none that the layer does not take."""

    def write(part: Part) -> list[str] | None:
        return unlike(part, defaults) if part.is_plain(*defaults) else None

    return write


def by_place(*names: str) -> Write:
    """Numbers by place."""

    def write(part: Part) -> list[str] | None:
        if not part.is_plain(*names):
            return None
        return [short(part.arguments[name]) for name in names]

    return write


def relu6(part: Part) -> list[str] | None:
    """Nothing: a hardtanh between 0 and 6."""
    ends = part.arguments["min_val"], part.arguments["max_val"]
    return [] if ends == (0, 6) else None


def dropout(part: Part) -> list[str] | None:
    """``0.1``; only what drops in training is a call at all."""
    return [short(part.arguments["p"])] if part.arguments["train"] else None


def pool(**defaults: Any) -> Write:
    """``3, stride=2``; a stride that is the kernel is not said."""

    def write(part: Part) -> list[str] | None:
        kernel, stride = part.arguments["kernel_size"], part.arguments["stride"]
        if not stride:
            return None
        step = [] if stride == kernel else [f"stride={short(stride)}"]
        return [short(kernel), *step, *unlike(part, defaults)]

    return write


def unflatten(part: Part) -> list[str] | None:
    """``1, (2, 3)``."""
    sizes = [str(size) for size in part.arguments["sizes"]]
    return [str(part.arguments["dim"]), listed(sizes)]


def padding(mode: str, *, valued: bool = False) -> Write:
    """``1``, ``(1, 0), 0.5``."""

    def write(part: Part) -> list[str] | None:
        value = part.arguments["value"]
        if part.arguments["mode"] != mode or (value is None) == (mode == "constant"):
            return None
        if not valued and value:
            return None
        return [short(part.arguments["pad"]), *([short(value)] if valued else [])]

    return write


def loss(**defaults: Any) -> Write:
    """``reduction="sum"``, of losses without weights."""

    def write(part: Part) -> list[str] | None:
        reduction = part.arguments["reduction"]
        if any(part.has(name) for name in ("weight", "pos_weight") if name in part.arguments):
            return None
        word = [] if reduction == 1 else [f'reduction="{REDUCTIONS[reduction]}"']
        return unlike(part, defaults) + word

    return write


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
