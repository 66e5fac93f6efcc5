"""Whole layers of torch.nn: a module whose nodes are exactly what one of them does.

The layer, made and called so, is captured as the very node. A module is one only where its class
is known to be torch's; a class of the model's own is never taken for one. What its constructor
takes is what capture noted of the layer, but for sizes, which are those of its tensors.

    Linear       linear(x, weight f32[4, 3])                       3, 4, bias=False
    Conv2d       conv2d(x, weight f32[8, 3, 7, 7], bias, [2, 2])   3, 8, kernel_size=7, stride=2
    GELU         gelu(x, approximate="tanh")                       approximate="tanh"
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import nn

from shardwright.codegenerate.spelling.forms import text_of, words
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

    @property
    def stored(self) -> dict[str, IRValue]:
        """The tensors that the layer has itself."""
        return {name: self.arguments[name] for name in STORED if self.has(name)}


# --- the table ------------------------------------------------------------------------------------

_LAYERS = words("""
    ReLU=relu ReLU6=relu6 ReLU6=hardtanh GELU=gelu SiLU=silu Mish=mish Tanh=tanh Sigmoid=sigmoid
    LogSigmoid=log_sigmoid Hardswish=hardswish Hardsigmoid=hardsigmoid SELU=selu ELU=elu CELU=celu
    LeakyReLU=leaky_relu Hardtanh=hardtanh Softplus=softplus Threshold=threshold
    Hardshrink=hardshrink Softshrink=softshrink GLU=glu Softmax=softmax.int PReLU=prelu
    LogSoftmax=log_softmax.int Flatten=flatten.using_ints Unflatten=unflatten.int
    PixelShuffle=pixel_shuffle PixelUnshuffle=pixel_unshuffle ChannelShuffle=channel_shuffle
    CosineSimilarity=cosine_similarity

    Linear=linear Bilinear=bilinear Embedding=embedding LayerNorm=layer_norm RMSNorm=rms_norm
    GroupNorm=group_norm Dropout=dropout AlphaDropout=alpha_dropout
    FeatureAlphaDropout=feature_alpha_dropout ConvTranspose1d=conv_transpose1d
    ConvTranspose2d=conv_transpose2d.input ConvTranspose3d=conv_transpose3d.input

    CrossEntropyLoss=cross_entropy_loss NLLLoss=nll_loss_nd BCELoss=binary_cross_entropy
    BCEWithLogitsLoss=binary_cross_entropy_with_logits KLDivLoss=kl_div
""")
_LAYERS_BY_RANK = words("""
    Conv{n}d=conv{n}d Conv{n}d=conv{n}d.padding BatchNorm{n}d=batch_norm
    InstanceNorm{n}d=instance_norm MaxPool{n}d=max_pool{n}d AvgPool{n}d=avg_pool{n}d
    AdaptiveAvgPool{n}d=adaptive_avg_pool{n}d Dropout{n}d=feature_dropout
    ZeroPad{n}d=pad ConstantPad{n}d=pad ReflectionPad{n}d=pad ReplicationPad{n}d=pad
    CircularPad{n}d=pad
""")
LAYERS = frozenset(
    (cls, f"aten.{op}" if "." in op else f"aten.{op}.default")
    for cls, op in (
        text.format(n=n).split("=") for n in (1, 2, 3) for text in (*_LAYERS, *_LAYERS_BY_RANK)
    )
)
"""Classes of layers, and the operator whose one node their call is."""

STATISTICS = ("running_mean", "running_var")
STORED = ("weight", "bias", *STATISTICS)
"""Tensors of operators that are the layer's own."""
MODE_FLAGS = ("train", "training", "use_input_stats")
"""What operators call the mode that their layer is in."""
_BY_PLACE = ("p", "num_parameters")
"""Optional parameters that stand by place."""
_LISTS = ("normalized_shape", "unflattened_size")
"""Parameters that take every number of a list, also where all are equal."""
_SIZES: Mapping[str, tuple[str, int]] = {
    "in_features": ("weight", 1),
    "out_features": ("weight", 0),
    "in1_features": ("weight", 1),
    "in2_features": ("weight", 2),
    "num_embeddings": ("weight", 0),
    "embedding_dim": ("weight", 1),
    "num_parameters": ("weight", 0),
    "num_features": ("input", 1),
    "num_channels": ("input", 1),
}
"""Of which tensor, and of which of its dimensions, a parameter is the size: a slot has a part."""


def _size(cls: str, name: str, call: LayerCall) -> int | None:
    """The size of the layer's tensors that a parameter of its constructor says."""
    if name in ("in_channels", "out_channels"):
        dim = int((name == "in_channels") != cls.startswith("ConvTranspose"))
        return call.shape("weight")[dim] * int(call["groups"] if dim else 1)
    return call.shape(_SIZES[name][0])[_SIZES[name][1]] if name in _SIZES else None


def _text(name: str, value: Any) -> str:
    """The text of a constructor's parameter; one number for a list of equal ones."""
    if not isinstance(value, list | tuple):
        return text_of(value)
    is_number = name == "normalized_shape" and len(value) == 1
    equal = name not in _LISTS and bool(value) and value.count(value[0]) == len(value)
    return text_of(value[0] if is_number or equal else [*value])


# --- constructors -------------------------------------------------------------------------------


@cache
def _constructor(cls: str) -> Mapping[str, str | None]:
    """The parameters of a layer's constructor, each with its default, None where it has none."""
    found = inspect.signature(getattr(nn, cls)).parameters.values()
    named = [p for p in found if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return {p.name: None if p.default is p.empty else _default(p.default) for p in named}


def _default(value: Any) -> str:
    known = value is None or isinstance(value, bool | int | float | str)
    return text_of(value) if known else repr(value)


def _texts(scope: Scope, call: LayerCall) -> list[str] | None:
    """The constructor's arguments, but for the dtype; None where capture did not note all."""
    cls, noted = scope.cls.rpartition(".")[2], dict(scope.arguments or ())
    texts = []
    for name, default in _constructor(cls).items():
        if name not in noted and default is None:
            return None
        if name not in noted or (name == "bias" and not call.has("weight")):
            continue
        value = _size(cls, name, call) or noted[name]
        if name == "stride" and default == "None" and value == noted["kernel_size"]:
            continue
        text = _text(name, value)
        is_kernel = name == "kernel_size" and call.has("weight")  # a third number says its name
        if (default is None or name in _BY_PLACE) and not is_kernel:
            texts.append(text)
        elif text != default:
            texts.append(f"{name}={text}")
    return texts


# --- finding --------------------------------------------------------------------------------------


def find_layer(
    graph: IRGraph,
    nodes: Sequence[IRNode],
    scope: Scope,
    *,
    training: bool,
) -> TorchLayer | None:
    """The layer whose one call is ``nodes``, in order, of the module of a scope.

    ``training`` is the mode of the whole model. What was called in another mode is no layer, which
    would go by the model's.
    """
    cls = scope.cls.rpartition(".")[2]
    if scope.arguments is None:
        return None
    calls = [LayerCall.of(node, graph.values) for node in nodes]
    if not all(_follows(call, training) for call in calls):
        return None
    if tuple(node.op for node in nodes) == _TRAINED_NORM and cls.startswith("BatchNorm"):
        return _batch_norm_in_training(graph, scope, calls)
    if len(nodes) > 1 or (cls, nodes[0].op) not in LAYERS:
        return None
    (call,), own = calls, calls[0].stored
    others = [v for name, v in call.arguments.items() if isinstance(v, IRValue) and name not in own]
    inputs = tuple(value.id for value in others)
    texts = _texts(scope, call) if _owns(scope, own) else None
    return _layer(graph, cls, texts, inputs, tuple(call.node.outputs), own)


def _follows(call: LayerCall, training: bool) -> bool:
    """Whether a call's flag of training, if it goes by one, is the model's."""
    if STATISTICS[0] in call.arguments and not call.has(STATISTICS[0]):
        return True  # without statistics of its own it does one thing in both modes
    said = [call[name] for name in MODE_FLAGS if name in call.arguments]
    return all(flag == training for flag in said)


def _owns(scope: Scope, values: Mapping[str, IRValue]) -> bool:
    """Whether the values are stored, each in this module under its name."""
    start = f"{scope.path}." if scope.path else ""
    return all(value.is_stored and start + name in value.names for name, value in values.items())


def _layer(
    graph: IRGraph,
    cls: str,
    texts: list[str] | None,
    arguments: tuple[int, ...],
    results: tuple[int, ...],
    own: Mapping[str, IRValue],
) -> TorchLayer | None:
    """The layer with its dtype; None where its parameters are of several, or frozen in part."""
    dtypes = {value.dtype for value in own.values() if torch_dtype(value.dtype).is_floating_point}
    trained = {takes_gradient(graph, value) for value in own.values() if value.role == "param"}
    if texts is None or len(dtypes) > 1 or len(trained) > 1:
        return None
    said = [f"dtype={torch_dtype(dtype)}" for dtype in dtypes if dtype != "f32"]
    frozen = ".requires_grad_(False)" if trained == {False} else ""
    stored = {name: value.id for name, value in own.items()}
    return TorchLayer(f"nn.{cls}({', '.join(texts + said)}){frozen}", arguments, results, stored)


def takes_gradient(graph: IRGraph, value: IRValue) -> bool:
    """Whether a parameter is trained; so it is where nothing is known."""
    tensor = graph.tensors.get(value.id)
    dtype = torch_dtype(value.dtype)
    differentiable = dtype.is_floating_point or dtype.is_complex
    return differentiable and (tensor is None or tensor.requires_grad)


# --- batch norm in training -----------------------------------------------------------------------

_TRAINED_NORM = ("aten.add.Tensor", "aten._native_batch_norm_legit_functional.default")


def _batch_norm_in_training(
    graph: IRGraph,
    scope: Scope,
    calls: Sequence[LayerCall],
) -> TorchLayer | None:
    """It counts the batches and moves its statistics, which the graph has as updates."""
    count, norm = calls
    own = {**norm.stored, "num_batches_tracked": count["self"]}
    if STATISTICS[0] not in own or not _owns(scope, own):
        return None
    if not (count.node.attrs == {"other": 1, "alpha": 1} and norm["training"]):
        return None
    (counted,), (result, *saved) = count.node.outputs, norm.node.outputs
    new = {"num_batches_tracked": counted, "running_mean": saved[2], "running_var": saved[3]}
    updated = all(graph.updates.get(own[name].id) == made for name, made in new.items())
    beside = (counted, *saved)
    if not updated or any(graph.values[i].users or i in graph.outputs for i in beside):
        return None
    cls = scope.cls.rpartition(".")[2]
    return _layer(graph, cls, _texts(scope, norm), (norm["input"].id,), (result,), own)
