"""Whole layers of torch.nn: a module whose nodes are exactly what one of them does.

The layer, made and called so, is captured as the very nodes. A module is one only where its class
is known to be torch's; a class of the model's own is never taken for one.

    Linear       linear(x, weight f32[4, 3])                       3, 4, bias=False
    Conv2d       conv2d(x, weight f32[8, 3, 7, 7], bias, [2, 2])   3, 8, kernel_size=7, stride=2
    GELU         gelu(x, approximate="tanh")                       approximate="tanh"
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from torch import nn

from shardwright.codegenerate.spelling.forms import parameters, text_of, words
from shardwright.codegenerate.spelling.table import REDUCTIONS
from shardwright.ir import IRGraph, IRNode, IRValue, Scope, resolve
from shardwright.ir.operators import named_arguments
from shardwright.ir.tensor_meta import torch_dtype


@dataclass(frozen=True, slots=True)
class TorchLayer:
    """A layer of torch.nn, ``nn.LayerNorm(768)``.

    ``arguments`` and ``results`` are value ids of its call, in order; ``parameters`` has its
    parameters and buffers by the name in the layer.
    """

    constructor: str
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    parameters: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class LayerCall:
    """A node of a module: its arguments by the schema's names, tensors as values."""

    node: IRNode
    arguments: Mapping[str, Any]

    @classmethod
    def of(cls, node: IRNode, values: Mapping[int, IRValue]) -> LayerCall:
        """The node's call."""
        inputs = [values[i] for i in node.inputs]
        return cls(node, named_arguments(resolve(node.op), inputs, node.attrs))

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def has(self, name: str) -> bool:
        """Whether the argument ``name`` is a tensor."""
        return isinstance(self.arguments.get(name), IRValue)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the tensor ``name``."""
        value = self.arguments[name]
        assert isinstance(value, IRValue)
        return value.shape


# --- the table ------------------------------------------------------------------------------------

Texts = Mapping[str, Callable[[LayerCall], str]]


@dataclass(frozen=True, slots=True)
class LayerRow:
    """A class of layers whose call is one node of an operator in ``ops``.

    own
        Arguments that the layer stores.
    texts
        The constructor's parameters that are no numbers of the same name in the operator's schema.
    places
        How many optional parameters stand by place.
    fits
        Whether the layer has that call at all.
    """

    ops: tuple[str, ...]
    own: tuple[str, ...] = ()
    texts: Texts = field(default_factory=dict)
    places: int = 0
    fits: Callable[[LayerCall], bool] = lambda call: True


WEIGHT = ("weight",)
AFFINE = ("weight", "bias")
STATISTICS = ("running_mean", "running_var")
MODE_FLAGS = ("train", "training", "use_input_stats")
"""What operators call the mode that their layer is in."""
_READ_OTHERWISE = (
    *MODE_FLAGS,
    *("cudnn_enable", "cudnn_enabled", "sizes", "pad", "mode", "value", "min_val", "max_val"),
)
"""Numbers of operators that rows look at, or that torch reads from its settings."""


def _short(value: Any) -> str:
    """A value's literal; one number for a list of equal ones."""
    if isinstance(value, list) and value and value.count(value[0]) == len(value):
        return text_of(value[0])
    return text_of(value)


def _size(tensor: str, dim: int) -> Callable[[LayerCall], str]:
    return lambda call: str(call.shape(tensor)[dim])


def _has(name: str) -> Callable[[LayerCall], str]:
    return lambda call: str(call.has(name))


def _has_bias(call: LayerCall) -> str:
    return str(call.has("bias") or not call.has("weight"))


def _no_bias_alone(call: LayerCall) -> bool:
    return call.has("weight") or not call.has("bias")


def _number_or_sizes(call: LayerCall) -> str:
    shape = call["normalized_shape"]
    return text_of(shape[0] if len(shape) == 1 else shape)


def _statistical(flag: str, rank: tuple[int, ...], *, kept: bool) -> LayerRow:
    """Norms over the batch, or over each example, of inputs of so many dimensions.

    The flag says to use the batch's statistics: ``kept`` where statistics are kept by default.
    """
    texts = {
        "num_features": _size("input", 1),
        "affine": _has("weight"),
        "bias": _has_bias,
        "track_running_stats": _has("running_mean"),
    }
    op = "aten.batch_norm.default" if kept else "aten.instance_norm.default"
    return LayerRow(
        (op,),
        AFFINE + STATISTICS,
        texts,
        fits=lambda call: (
            call[flag] != call.has("running_mean")
            and len(call.shape("input")) in rank
            and _no_bias_alone(call)
        ),
    )


def _convolution(ops: tuple[str, ...], into: int, out: int) -> LayerRow:
    """Convolutions, whose weight has these dimensions for channels in and out."""

    def channels(dim: int) -> Callable[[LayerCall], str]:
        return lambda call: str(call.shape("weight")[dim] * (call["groups"] if dim == 1 else 1))

    texts = {
        "in_channels": channels(into),
        "out_channels": channels(out),
        "kernel_size": lambda call: _short(list(call.shape("weight")[2:])),
        "bias": _has("bias"),
    }
    return LayerRow(ops, AFFINE, texts)


def _pool(op: str) -> LayerRow:
    """Pools; a stride that is the kernel is not said."""

    def stride(call: LayerCall) -> str:
        return "None" if call["stride"] == call["kernel_size"] else _short(call["stride"])

    return LayerRow((op,), texts={"stride": stride}, fits=lambda call: bool(call["stride"]))


def _padding(mode: str, *, valued: bool = False) -> LayerRow:
    """``1``, ``(1, 0), 0.5``."""
    texts: dict[str, Callable[[LayerCall], str]] = {"padding": lambda call: _short(call["pad"])}
    constant = mode == "constant"

    def fits(call: LayerCall) -> bool:
        value = call["value"]
        return call["mode"] == mode and (value is None) != constant and (valued or not value)

    return LayerRow(("aten.pad.default",), texts=texts, fits=fits)


def _loss(op: str) -> LayerRow:
    """Losses without weights; reductions are words."""
    texts = {"reduction": lambda call: text_of(REDUCTIONS[call["reduction"]])}
    weights = ("weight", "pos_weight")
    return LayerRow((op,), texts=texts, fits=lambda call: not any(map(call.has, weights)))


def _dropout(op: str) -> LayerRow:
    """``0.1``; only what drops in training is a call at all."""
    return LayerRow((op,), places=1, fits=lambda call: bool(call["train"]))


def _is_relu6(call: LayerCall) -> bool:
    return (call.arguments.get("min_val", 0), call.arguments.get("max_val", 6)) == (0, 6)


_BILINEAR = {
    "in1_features": _size("weight", 1),
    "in2_features": _size("weight", 2),
    "out_features": _size("weight", 0),
    "bias": _has("bias"),
}
_LINEAR = {
    "in_features": _size("weight", 1),
    "out_features": _size("weight", 0),
    "bias": _has("bias"),
}
_EMBEDDING = {
    "num_embeddings": _size("weight", 0),
    "embedding_dim": _size("weight", 1),
    "padding_idx": lambda call: "None" if call["padding_idx"] == -1 else str(call["padding_idx"]),
}
_LAYER_NORM = {
    "normalized_shape": _number_or_sizes,
    "elementwise_affine": _has("weight"),
    "bias": _has_bias,
}
_GROUP_NORM = {"num_channels": _size("input", 1), "affine": _has("weight"), "bias": _has_bias}
_PLAIN = words("""
    ReLU=relu ReLU6=relu6 GELU=gelu SiLU=silu Mish=mish Tanh=tanh Sigmoid=sigmoid
    LogSigmoid=log_sigmoid Hardswish=hardswish Hardsigmoid=hardsigmoid SELU=selu ELU=elu CELU=celu
    LeakyReLU=leaky_relu Hardtanh=hardtanh Softplus=softplus Threshold=threshold
    Hardshrink=hardshrink Softshrink=softshrink GLU=glu Softmax=softmax.int
    LogSoftmax=log_softmax.int Flatten=flatten.using_ints PixelShuffle=pixel_shuffle
    PixelUnshuffle=pixel_unshuffle ChannelShuffle=channel_shuffle
    CosineSimilarity=cosine_similarity AdaptiveAvgPool1d=adaptive_avg_pool1d
    AdaptiveAvgPool2d=adaptive_avg_pool2d AdaptiveAvgPool3d=adaptive_avg_pool3d
""")
"""Layers without parameters whose numbers have the schema's own names."""


def _op(name: str) -> str:
    return f"aten.{name}" if "." in name else f"aten.{name}.default"


LAYERS: Mapping[str, LayerRow] = {
    **{cls: LayerRow((_op(op),)) for cls, op in (text.split("=") for text in _PLAIN)},
    "ReLU6": LayerRow(("aten.relu6.default", "aten.hardtanh.default"), fits=_is_relu6),
    "Linear": LayerRow(("aten.linear.default",), AFFINE, _LINEAR),
    "Bilinear": LayerRow(("aten.bilinear.default",), AFFINE, _BILINEAR),
    "Embedding": LayerRow(("aten.embedding.default",), WEIGHT, _EMBEDDING),
    **{
        f"Conv{n}d": _convolution((f"aten.conv{n}d.default", f"aten.conv{n}d.padding"), 1, 0)
        for n in (1, 2, 3)
    },
    "ConvTranspose1d": _convolution(("aten.conv_transpose1d.default",), 0, 1),
    "ConvTranspose2d": _convolution(("aten.conv_transpose2d.input",), 0, 1),
    "ConvTranspose3d": _convolution(("aten.conv_transpose3d.input",), 0, 1),
    "LayerNorm": LayerRow(("aten.layer_norm.default",), AFFINE, _LAYER_NORM, fits=_no_bias_alone),
    "RMSNorm": LayerRow(("aten.rms_norm.default",), WEIGHT, _LAYER_NORM),
    "GroupNorm": LayerRow(("aten.group_norm.default",), AFFINE, _GROUP_NORM, fits=_no_bias_alone),
    "BatchNorm1d": _statistical("training", (2, 3), kept=True),
    "BatchNorm2d": _statistical("training", (4,), kept=True),
    "BatchNorm3d": _statistical("training", (5,), kept=True),
    **{
        f"InstanceNorm{n}d": _statistical("use_input_stats", (n + 2,), kept=False)
        for n in (1, 2, 3)
    },
    "PReLU": LayerRow(
        ("aten.prelu.default",), WEIGHT, {"num_parameters": _size("weight", 0)}, places=1
    ),
    "Dropout": _dropout("aten.dropout.default"),
    **{f"Dropout{n}d": _dropout("aten.feature_dropout.default") for n in (1, 2, 3)},
    "AlphaDropout": _dropout("aten.alpha_dropout.default"),
    "FeatureAlphaDropout": _dropout("aten.feature_alpha_dropout.default"),
    "Unflatten": LayerRow(
        ("aten.unflatten.int",), texts={"unflattened_size": lambda call: text_of(call["sizes"])}
    ),
    **{f"MaxPool{n}d": _pool(f"aten.max_pool{n}d.default") for n in (1, 2, 3)},
    **{f"AvgPool{n}d": _pool(f"aten.avg_pool{n}d.default") for n in (1, 2, 3)},
    **{
        f"{cls}Pad{n}d": _padding(mode, valued=cls == "Constant")
        for n in (1, 2, 3)
        for cls, mode in (
            ("Zero", "constant"),
            ("Constant", "constant"),
            ("Reflection", "reflect"),
            ("Replication", "replicate"),
            ("Circular", "circular"),
        )
    },
    "CrossEntropyLoss": _loss("aten.cross_entropy_loss.default"),
    "NLLLoss": _loss("aten.nll_loss_nd.default"),
    "BCELoss": _loss("aten.binary_cross_entropy.default"),
    "BCEWithLogitsLoss": _loss("aten.binary_cross_entropy_with_logits.default"),
    "KLDivLoss": _loss("aten.kl_div.default"),
    "MSELoss": _loss("aten.mse_loss.default"),
    "L1Loss": _loss("aten.l1_loss.default"),
    "SmoothL1Loss": _loss("aten.smooth_l1_loss.default"),
    "HuberLoss": _loss("aten.huber_loss.default"),
}


class ConstructorParameter(NamedTuple):
    """A parameter of a layer's constructor; ``default`` is its text, None where it is required."""

    name: str
    default: str | None


@cache
def _constructor(cls: str) -> tuple[ConstructorParameter, ...]:
    given = inspect.signature(getattr(nn, cls)).parameters.values()
    return tuple(
        ConstructorParameter(p.name, None if p.default is p.empty else _default(p.default))
        for p in given
    )


def _default(value: Any) -> str:
    known = value is None or isinstance(value, bool | int | float | str)
    return text_of(value) if known else repr(value)


def _texts(cls: str, row: LayerRow, call: LayerCall) -> list[str] | None:
    """The constructor's arguments, but for the dtype; None where no such layer has that call."""
    constructor = _constructor(cls)
    taken = {parameter.name for parameter in constructor} | {*_READ_OTHERWISE}
    for slot in parameters(call.node.op):
        plain = slot.name in taken or call.has(slot.name) or call[slot.name] == slot.default
        if not plain:
            return None
    texts = []
    for place, (name, default) in enumerate(constructor):
        if name in row.texts:
            text = row.texts[name](call)
        elif name in call.arguments and not call.has(name) and name not in ("weight", "bias"):
            text = _short(call[name])
        else:
            continue
        is_kernel = name == "kernel_size" and bool(row.own)  # a third number says its name
        if (default is None or place < row.places) and not is_kernel:
            texts.append(text)
        elif text != default:
            texts.append(f"{name}={text}")
    return texts


# --- finding --------------------------------------------------------------------------------------


def find_layer(
    graph: IRGraph,
    nodes: Sequence[IRNode],
    scope: Scope,
    names: Mapping[int, str],
    *,
    training: bool,
) -> TorchLayer | None:
    """The layer whose one call is ``nodes``, in order, of the module of a scope.

    ``names`` has the full path of every stored value, ``h.0.ln_1.weight``; ``training`` is the
    mode of the whole model. What was called in another mode is no layer, which would go by the
    model's.
    """
    package, _, cls = scope.cls.rpartition(".")
    row = LAYERS.get(cls) if f"{package}.".startswith("torch.nn.modules.") else None
    calls = [LayerCall.of(node, graph.values) for node in nodes]
    if row is None or not all(_follows(call, training) for call in calls):
        return None
    if tuple(node.op for node in nodes) == _TRAINED_NORM and cls.startswith("BatchNorm"):
        return _batch_norm_in_training(graph, scope, names, cls, row, calls)
    *broadcast, call = calls
    if call.node.op not in row.ops or not row.fits(call):
        return None
    own = {name: call[name] for name in row.own if call.has(name)}
    others = [v for name, v in call.arguments.items() if isinstance(v, IRValue) and name not in own]
    if broadcast and not _is_broadcast_alone(graph, nodes):
        return None
    inputs = broadcast[0].node.inputs if broadcast else [value.id for value in others]
    texts = _texts(cls, row, call) if _owns(scope, names, own) else None
    return _layer(cls, texts, tuple(inputs), tuple(call.node.outputs), own)


def _is_broadcast_alone(graph: IRGraph, nodes: Sequence[IRNode]) -> bool:
    """Whether two tensors are broadcast for the second node alone, as for losses."""
    first, last = nodes[0], nodes[-1]
    return (
        len(nodes) == 2
        and first.op == "aten.broadcast_tensors.default"
        and last.inputs == first.outputs
        and not any(graph.values[i].users != [last.id] or i in graph.outputs for i in first.outputs)
    )


def _follows(call: LayerCall, training: bool) -> bool:
    """Whether a call's flag of training, if it goes by one, is the model's."""
    if STATISTICS[0] in call.arguments and not call.has(STATISTICS[0]):
        return True  # without statistics of its own it does one thing in both modes
    said = [call[name] for name in MODE_FLAGS if name in call.arguments]
    return all(flag == training for flag in said)


def _owns(scope: Scope, names: Mapping[int, str], values: Mapping[str, IRValue]) -> bool:
    """Whether the values are stored, each in this module under its name."""
    return all(
        value.is_stored
        and f"{scope.path}.{name}".lstrip(".") in (*value.names, names.get(value.id))
        for name, value in values.items()
    )


def _layer(
    cls: str,
    texts: list[str] | None,
    arguments: tuple[int, ...],
    results: tuple[int, ...],
    own: Mapping[str, IRValue],
) -> TorchLayer | None:
    """The layer with its dtype; None where its parameters are of several."""
    dtypes = {value.dtype for value in own.values() if torch_dtype(value.dtype).is_floating_point}
    if texts is None or len(dtypes) > 1:
        return None
    said = [f"dtype={torch_dtype(dtype)}" for dtype in dtypes if dtype != "f32"]
    stored = {name: value.id for name, value in own.items()}
    return TorchLayer(f"nn.{cls}({', '.join(texts + said)})", arguments, results, stored)


# --- batch norm in training -----------------------------------------------------------------------

_TRAINED_NORM = ("aten.add.Tensor", "aten._native_batch_norm_legit_functional.default")


def _batch_norm_in_training(
    graph: IRGraph,
    scope: Scope,
    names: Mapping[int, str],
    cls: str,
    row: LayerRow,
    calls: Sequence[LayerCall],
) -> TorchLayer | None:
    """It counts the batches and moves its statistics, which the graph has as updates."""
    count, norm = calls
    own = {name: norm[name] for name in row.own if norm.has(name)}
    own["num_batches_tracked"] = count["self"]
    if STATISTICS[0] not in own or not _owns(scope, names, own):
        return None
    if not (count.node.attrs == {"other": 1, "alpha": 1} and norm["training"]):
        return None
    (counted,), (result, *saved) = count.node.outputs, norm.node.outputs
    new = {"num_batches_tracked": counted, "running_mean": saved[2], "running_var": saved[3]}
    updated = all(graph.updates.get(own[name].id) == made for name, made in new.items())
    beside = (counted, *saved)
    if not updated or any(graph.values[i].users or i in graph.outputs for i in beside):
        return None
    return _layer(cls, _texts(cls, row, norm), (norm["input"].id,), (result,), own)
