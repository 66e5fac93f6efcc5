"""What follows a convolution, done by the convolution: adding a residual, and an activation.

Comes in: a graph of inference. Goes out: the same with `shardwright::conv` in place of each
convolution and of the addition and the activation behind it, where nothing else reads what is
between them. What always holds: the fused call stands where the last of its parts stood, so that
the residual is made before it; what it makes has the shape, dtype and strides of what that part
made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwright.compiler.passes.rewriter import Rewriter, Tensor, arguments, call_attributes
from shardwright.compiler.passes.rewriter import same_layout as lie_alike
from shardwright.ir import IRGraph, IRNode, IRValue
from shardwright.ir.tensor_meta import torch_dtype
from shardwright.kernels.operators import CONV
from shardwright.kernels.row import ACTIVATIONS

CONVOLUTIONS = frozenset({"aten.conv2d.default", "aten.convolution.default"})

FOLLOWING: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "aten.relu.default": lambda given: "relu",
    "aten.gelu.default": lambda given: "gelu_tanh" if given["approximate"] == "tanh" else "gelu",
    "aten.silu.default": lambda given: "silu",
    "aten.tanh.default": lambda given: "tanh",
    "aten.sigmoid.default": lambda given: "sigmoid",
}
"""Operators that are activations, and the name of the one that they are."""


@dataclass
class _Fusion:
    """A convolution and what follows it; ``last`` is the final part."""

    conv: IRNode
    last: IRNode
    residual: int | None = None
    activation: str = "none"
    parts: list[int] = field(default_factory=list)


def fuse_convs(graph: IRGraph) -> IRGraph:
    """The graph with convolutions that do what follows them."""
    fusions = _find(graph)
    if not fusions:
        return graph
    rewriter = Rewriter(graph)
    ends = {fusion.last.id: fusion for fusion in fusions}
    parts = {node_id for fusion in fusions for node_id in fusion.parts}
    for node in graph.nodes:
        if node.id in ends:
            _emit(rewriter, ends[node.id])
        elif node.id not in parts:
            rewriter.keep(node)
    return rewriter.finish()


def _find(graph: IRGraph) -> list[_Fusion]:
    """Fusions of more than a convolution alone; each node is in one at most."""
    nodes = graph.node_by_id()
    taken: set[int] = set()
    found = []
    for node in reversed(graph.nodes):  # of two convolutions that are added, the later one adds
        if node.op in CONVOLUTIONS and _is_plain(graph, node):
            fusion = _grow(graph, node, nodes, taken)
            if fusion.parts:
                fusion.parts.append(node.id)
                taken.update(fusion.parts)
                found.append(fusion)
    return found


def _is_plain(graph: IRGraph, node: IRNode) -> bool:
    """Whether a convolution is two-dimensional, of floats, with a batch, and not transposed."""
    value, weight = graph.values[node.inputs[0]], graph.values[node.inputs[1]]
    floats = torch_dtype(value.dtype).is_floating_point
    four = len(value.shape) == len(weight.shape) == 4
    return floats and four and not node.attrs.get("transposed")


def _grow(graph: IRGraph, conv: IRNode, nodes: Mapping[int, IRNode], taken: set[int]) -> _Fusion:
    """The convolution with as much of what follows it as can be had."""
    fusion = _Fusion(conv, conv)
    follower = _only_user(graph, fusion.last, nodes, taken)
    if follower is not None and (other := _added(graph, fusion.last, follower)) is not None:
        fusion.residual = other
        fusion.parts.append(follower.id)
        fusion.last = follower
        follower = _only_user(graph, fusion.last, nodes, taken)
    if follower is not None and follower.op in FOLLOWING:
        fusion.activation = FOLLOWING[follower.op](arguments(follower))
        fusion.parts.append(follower.id)
        fusion.last = follower
    return fusion


def _only_user(
    graph: IRGraph, node: IRNode, nodes: Mapping[int, IRNode], taken: set[int]
) -> IRNode | None:
    """The one node that reads what a node makes, where nothing else does."""
    value = graph.values[node.outputs[0]]
    if value.role == "output" or len(value.users) != 1 or value.users[0] in taken:
        return None
    if value.id in graph.updates.values():
        return None
    return nodes[value.users[0]]


def _added(graph: IRGraph, conv: IRNode, add: IRNode) -> int | None:
    """What is added to a convolution's result, where it is a tensor alike."""
    if add.op != "aten.add.Tensor" or add.attrs.get("alpha") != 1 or len(add.inputs) != 2:
        return None
    made, result = graph.values[conv.outputs[0]], graph.values[add.outputs[0]]
    other = _other(add.inputs, made)
    alike = other is not None and lie_alike(graph.values[other], result)
    return other if alike and lie_alike(made, result) else None


def _other(inputs: list[int], made: IRValue) -> int | None:
    others = [value_id for value_id in inputs if value_id != made.id]
    return others[0] if len(others) == 1 else None


def _emit(rewriter: Rewriter, fusion: _Fusion) -> None:
    """The fused call, in place of its last part."""
    given = arguments(fusion.conv)
    kept = ("stride", "padding", "dilation", "groups")
    tensors = {
        "x": given["input"],
        "w": given["weight"],
        "bias": given["bias"],
        "residual": fusion.residual,
    }
    here = {k: None if v is None else Tensor(rewriter.now(v)) for k, v in tensors.items()}
    sizes = {name: given[name] for name in kept}
    activation = ACTIVATIONS.index(fusion.activation)
    inputs, attrs = call_attributes(CONV, {**here, **sizes, "activation": activation})
    result = rewriter.source.values[fusion.last.outputs[0]]
    rewriter.emit(CONV, inputs, [result], attrs, fusion.conv)
