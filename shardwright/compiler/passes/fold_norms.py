"""Batch norms in evaluation, folded into the convolution or linear layer before them.

Statistics and weights are stored, and nothing else reads the layer's result. With
s = weight / sqrt(var + eps), a norm of conv(x, W, b) is conv(x, s W, s (b - mean) + bias).

The folded weights are computed here, once, in f64, of the contents that ``graph.tensors`` has now:
whoever replaces weights afterwards folds again. No value that an update replaces is folded; a
weight that several layers share is folded for each by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from shardwright.compiler.passes.rewriter import Rewriter, Tensor, arguments
from shardwright.ir import IRGraph, IRNode

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
            _emit(rewriter, *folds[node.id], node)
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


def _emit(rewriter: Rewriter, layer: IRNode, norm: _Norm, node: IRNode) -> None:
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
