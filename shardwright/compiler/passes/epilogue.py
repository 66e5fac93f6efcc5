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
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

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
