"""Epilogues: what follows a matrix product or a convolution, done while its result is at hand.

    * number, / number                      alpha (products)
    + vector                                bias (products)
    + tensor                                residual; a sum of gradients of two uses is one, too
    relu, gelu, silu, tanh, sigmoid         activation

What is taken in is read by nobody else (a backward that reads the pre-activation keeps it apart).
The order is that of the kinds, ``act(alpha * a b + bias + residual)``. The fused call has the place
of the last node that it took in, so that the residual is made before it; its result has the shape,
dtype and strides of that node's. Between a product and what follows it may stand views that leave
the columns alone. Only products of f32 and f64 fuse: a half is rounded where it is stored.
Convolutions fuse in inference.

A batch norm by stored statistics is folded into a convolution or linear layer of stored weights
that nothing else reads. With s = weight / sqrt(var + eps), a norm of conv(x, W, b) is
conv(x, s W, s (b - mean) + bias). The folded weights are computed here, once, in f64, of the
contents that ``graph.tensors`` has now: whoever replaces weights afterwards folds again. No value
that an update replaces is folded; a weight that several layers share is folded for each by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from shardwright.compiler.passes.rewriter import (
    Rewriter,
    Tensor,
    arguments,
    same_layout,
)
from shardwright.ir import IRGraph, IRNode, IRValue
from shardwright.ir.tensor_meta import torch_dtype
from shardwright.kernels.operators import CONV, GEMM
from shardwright.kernels.row import ACTIVATIONS

CONVOLUTIONS = frozenset({"aten.conv2d.default", "aten.convolution.default"})
_VIEWS = frozenset({"aten.view.default", "aten._unsafe_view.default", "aten.reshape.default"})
_ACTIVATIONS = {
    f"aten.{name}.default": name for name in ("relu", "gelu", "silu", "tanh", "sigmoid")
}


@dataclass(frozen=True, slots=True)
class FusedCall:
    """A product or convolution, and what it has taken in.

    op, given
        The operator that is written, and its arguments by name, with ids of the source.
    last
        The node whose place it takes; ``taken`` are the ids of all that it does.
    """

    node: IRNode
    op: str
    given: Mapping[str, Any]
    last: IRNode
    taken: frozenset[int] = field(default_factory=frozenset)

    def takes(self, node: IRNode, passed: frozenset[int], given: Mapping[str, Any]) -> FusedCall:
        """With one more node, and the views before it."""
        taken = self.taken | passed | {self.last.id}
        return replace(self, given={**self.given, **given}, last=node, taken=taken)


def fuse_gemms(graph: IRGraph) -> IRGraph:
    """The graph with products that do what follows them."""
    products = (
        FusedCall(node, GEMM, arguments(node), node)
        for node in graph.nodes
        if node.op == GEMM and graph.values[node.outputs[0]].dtype in ("f32", "f64")
    )
    return _fused(graph, products, _GEMM_RULES)


def fuse_convolutions(graph: IRGraph) -> IRGraph:
    """The graph with convolutions that do what follows them."""
    convolutions = (
        FusedCall(node, CONV, _convolution(node), node)
        for node in reversed(graph.nodes)  # of two that are added, the later one adds
        if node.op in CONVOLUTIONS and _is_plain(graph, node)
    )
    return _fused(graph, convolutions, _CONV_RULES)


def _fused(graph: IRGraph, calls: Iterable[FusedCall], rules: Mapping[str, _Rule]) -> IRGraph:
    nodes = graph.node_by_id()
    kept = {*graph.outputs, *graph.updates.values()}
    grown: dict[int, FusedCall] = {}
    taken: set[int] = set()
    for call in calls:
        found = _grow(graph, nodes, kept, taken, call, rules)
        if found.last is not call.node:
            grown[found.last.id] = found
            taken |= found.taken | {found.last.id}
    if not grown:
        return graph
    rewriter = Rewriter(graph)
    for node in graph.nodes:
        if node.id in grown:
            _write(rewriter, grown[node.id])
        elif node.id not in taken:
            rewriter.keep(node)
    return rewriter.finish()


def _grow(
    graph: IRGraph,
    nodes: Mapping[int, IRNode],
    kept: set[int],
    taken: set[int],
    call: FusedCall,
    rules: Mapping[str, _Rule],
) -> FusedCall:
    """The call with all that it can take in."""
    value = graph.values[call.node.outputs[0]]
    passed: frozenset[int] = frozenset()
    while len(value.users) == 1 and value.id not in kept:
        user = nodes[value.users[0]]
        if user.id in taken or len(user.outputs) != 1:
            break
        made = graph.values[user.outputs[0]]
        if call.op == GEMM and user.op in _VIEWS and _leaves_columns(value, made):
            passed |= {user.id}
        else:
            rule = rules.get(user.op)
            fits = same_layout(value, made) and call.given["activation"] == 0
            given = rule(graph, call, user, value) if rule is not None and fits else None
            if given is None:
                break
            call, passed = call.takes(user, passed, given), frozenset()
        value = made
    return call


def _leaves_columns(value: IRValue, made: IRValue) -> bool:
    """Whether a view of a contiguous value only divides its rows in another way."""
    return bool(made.shape) and made.shape[-1] == value.shape[-1] and made.strides is None


def _is_plain(graph: IRGraph, node: IRNode) -> bool:
    """Whether a convolution is two-dimensional, of floats, with a batch, and not transposed."""
    value, weight = graph.values[node.inputs[0]], graph.values[node.inputs[1]]
    floats = torch_dtype(value.dtype).is_floating_point
    four = len(value.shape) == len(weight.shape) == 4
    return floats and four and not node.attrs.get("transposed")


def _convolution(node: IRNode) -> dict[str, Any]:
    """The arguments of a convolution as those of the fused operator."""
    given = arguments(node)
    sizes = {name: given[name] for name in ("stride", "padding", "dilation", "groups")}
    tensors = {"x": given["input"], "w": given["weight"], "bias": given["bias"]}
    return {**tensors, "residual": None, **sizes, "activation": 0}


# --- what can follow: the arguments that it becomes, None where it cannot be taken in -------------


def _residual(
    graph: IRGraph, call: FusedCall, node: IRNode, value: IRValue
) -> Mapping[str, Any] | None:
    """A tensor of the result's shape."""
    other = _added(node, value)
    if other is None or call.given["residual"] is not None:
        return None
    return {"residual": other} if same_layout(graph.values[other], value) else None


def _bias_or_residual(
    graph: IRGraph, call: FusedCall, node: IRNode, value: IRValue
) -> Mapping[str, Any] | None:
    """A vector as bias, or a tensor of the result's shape as residual."""
    if (vid := _added(node, value)) is None:
        return None
    other = graph.values[vid]
    is_bias = other.shape == value.shape[-1:] and len(value.shape) > 1
    plain = call.given["bias"] is None and other.strides is None and other.dtype == value.dtype
    return {"bias": vid} if is_bias and plain else _residual(graph, call, node, value)


def _added(node: IRNode, value: IRValue) -> Tensor | None:
    """What is added to a value, where it is another tensor."""
    given = arguments(node)
    operands = [given["self"], given["other"]]
    if given["alpha"] != 1 or not all(isinstance(item, Tensor) for item in operands):
        return None
    others = [item for item in operands if item != value.id]
    return others[0] if len(others) == 1 else None


def _scale(
    graph: IRGraph, call: FusedCall, node: IRNode, value: IRValue
) -> Mapping[str, Any] | None:
    """A number that the product alone is multiplied with, or divided by."""
    number = node.attrs.get("other")
    plain = call.given["bias"] is None and call.given["residual"] is None
    if not plain or not isinstance(number, (int, float)):
        return None
    factor = 1 / number if node.op.startswith("aten.div") and number else float(number)
    return {"alpha": call.given["alpha"] * factor} if number and math.isfinite(factor) else None


def _activate(
    graph: IRGraph, call: FusedCall, node: IRNode, value: IRValue
) -> Mapping[str, Any] | None:
    name = _ACTIVATIONS[node.op]
    if node.attrs.get("approximate") == "tanh":
        name = "gelu_tanh"
    return {"activation": ACTIVATIONS.index(name)}


_Rule = Callable[[IRGraph, FusedCall, IRNode, IRValue], Mapping[str, Any] | None]
_CONV_RULES: Mapping[str, _Rule] = {
    "aten.add.Tensor": _residual,
    **dict.fromkeys(_ACTIVATIONS, _activate),
}
_GEMM_RULES: Mapping[str, _Rule] = {
    **_CONV_RULES,
    "aten.add.Tensor": _bias_or_residual,
    "aten.mul.Tensor": _scale,
    "aten.mul.Scalar": _scale,
    "aten.div.Tensor": _scale,
    "aten.div.Scalar": _scale,
}


def _write(rewriter: Rewriter, call: FusedCall) -> None:
    """Append the fused call, and a view where what it took in came after one."""
    values = rewriter.source.values
    own, made = values[call.node.outputs[0]], values[call.last.outputs[0]]
    given, residual = dict(call.given), call.given["residual"]
    if residual is not None and values[residual].shape != own.shape:
        size, name = {"size": list(own.shape)}, values[residual].name
        (viewed,) = rewriter.call(
            "aten.view.default", [rewriter.now(residual)], size, call.last, name
        )
        assert viewed is not None
        given["residual"] = Tensor(viewed)
    output = made if own.shape == made.shape else rewriter.fresh(own)
    rewriter.write(call.op, given, [output], call.node if call.op == CONV else call.last)
    if output is not made:
        size = {"size": list(made.shape)}
        rewriter.emit("aten.view.default", [output.id], [made], size, call.last)


# --- batch norms in evaluation, folded into the layer before them ---------------------------------


LAYERS = frozenset(
    {
        "aten.conv1d.default",
        "aten.conv2d.default",
        "aten.conv3d.default",
        "aten.conv2d.padding",
        "aten.convolution.default",
        "aten.linear.default",
    }
)
"""Layers ``(input, weight, bias, ...)`` whose weight's first dimension is the result's channels."""

NORMS = frozenset(
    {
        "aten.batch_norm.default",
        "aten.native_batch_norm.default",
        "aten._native_batch_norm_legit_no_training.default",
    }
)
"""Batch norms by running statistics, where ``training`` says so or is not asked."""


class _Norm(NamedTuple):
    """What a batch norm does to each channel: ``scale * x + shift``, f64."""

    scale: torch.Tensor
    shift: torch.Tensor


def fold_norms(graph: IRGraph) -> IRGraph:
    """The graph with its batch norms folded where they can be."""
    producers = {value_id: node for node in graph.nodes for value_id in node.outputs}
    folds: dict[int, tuple[IRNode, _Norm]] = {}
    for node in graph.nodes:
        layer = producers.get(node.inputs[0]) if node.op in NORMS else None
        if layer is not None and (norm := _folds(graph, layer, node)) is not None:
            folds[node.id] = layer, norm
    if not folds:
        return graph
    rewriter = Rewriter(graph)
    dropped = {layer.id for layer, _ in folds.values()}
    for node in graph.nodes:
        if node.id in folds:
            _write_folded(rewriter, *folds[node.id], node)
        elif node.id not in dropped:
            rewriter.keep(node)
    return rewriter.finish()


def _folds(graph: IRGraph, layer: IRNode, norm: IRNode) -> _Norm | None:
    """The norm as scale and shift, where it can be folded into the layer."""
    made, result = graph.values[layer.outputs[0]], graph.values[norm.outputs[0]]
    if layer.op not in LAYERS or made.users != [norm.id] or made.role == "output":
        return None
    if any(graph.values[v].users or graph.values[v].role == "output" for v in norm.outputs[1:]):
        return None
    given = arguments(layer)
    stored = [given["weight"], *([] if given["bias"] is None else [given["bias"]])]
    if given.get("transposed") or not all(_contents(graph, v) is not None for v in stored):
        return None
    if made.dtype != result.dtype or not _channels_second(graph, layer):
        return None
    return _norm(graph, arguments(norm))


def _channels_second(graph: IRGraph, layer: IRNode) -> bool:
    """Whether what a layer makes of one weight's row is what a norm takes for a channel."""
    rank = len(graph.values[layer.outputs[0]].shape)
    if layer.op == "aten.linear.default":
        return rank == 2
    return rank == len(graph.values[layer.inputs[1]].shape)


def _norm(graph: IRGraph, given: Mapping[str, Any]) -> _Norm | None:
    """Scale and shift of a batch norm by stored statistics; None for any other."""
    if given.get("training"):
        return None
    names = ("weight", "bias", "running_mean", "running_var")
    weight, bias, mean, var = (_contents(graph, given[name]) for name in names)
    missing = [given[n] for n, t in zip(names, (weight, bias, mean, var), strict=True) if t is None]
    if mean is None or var is None or any(value_id is not None for value_id in missing):
        return None
    scale = (var.double() + given["eps"]).rsqrt()
    scale = scale if weight is None else scale * weight.double()
    shift = -mean.double() * scale
    return _Norm(scale, shift if bias is None else shift + bias.double())


def _contents(graph: IRGraph, value_id: int | None) -> torch.Tensor | None:
    """What a stored value holds for good; None where nothing does, or an update replaces it."""
    if value_id is None or value_id in graph.updates:
        return None
    tensor = graph.tensors.get(value_id)
    return None if tensor is None or tensor.is_meta else tensor.detach()


def _write_folded(rewriter: Rewriter, layer: IRNode, norm: _Norm, node: IRNode) -> None:
    """The layer with folded weights, in place of the norm; ``node`` is the norm's."""
    graph, given = rewriter.source, arguments(layer)
    weight = graph.tensors[given["weight"]].detach()
    scale = norm.scale.reshape(-1, *[1] * (weight.dim() - 1))
    bias = norm.shift
    if given["bias"] is not None:
        bias = bias + norm.scale * graph.tensors[given["bias"]].detach().double()
    name = graph.values[given["weight"]].name
    folded = {
        # the product is of f64, rounded as it is written
        "weight": _constant(
            rewriter, f"{name}.folded", torch.mul(weight, scale, out=torch.empty_like(weight))
        ),
        "bias": _constant(rewriter, f"{name}.folded_bias", bias.to(weight.dtype)),
    }
    rewriter.write(layer.op, given | folded, [graph.values[node.outputs[0]]], layer)


def _constant(rewriter: Rewriter, name: str, contents: torch.Tensor) -> Tensor:
    return Tensor(rewriter.constant(name, contents))
