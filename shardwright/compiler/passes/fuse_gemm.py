"""What follows a matrix product, done while its result is at hand.

    * number, / number                      alpha
    + vector                                bias
    + tensor                                residual; a sum of gradients of two uses is one, too
    relu, gelu, silu, tanh, sigmoid         activation

Comes in: a graph with `shardwright::gemm`. Goes out: the same, with fewer
nodes. What always holds: what is taken in is read by nobody else (a backward that reads the
pre-activation keeps it apart), the order is that of the kind, ``act(alpha * a b + bias +
residual)``, and between a gemm and what follows it may stand views that leave the columns alone.
Only f32 and f64 fuse: a half is rounded where it is stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shardwright.compiler.passes.rewriter import (
    Rewriter,
    Tensor,
    arguments,
    call_attributes,
    same_layout,
)
from shardwright.ir import IRGraph, IRNode, IRValue
from shardwright.kernels.operators import GEMM
from shardwright.kernels.row import ACTIVATIONS

_VIEWS = frozenset({"aten.view.default", "aten._unsafe_view.default", "aten.reshape.default"})
_ACTIVATIONS = {
    f"aten.{name}.default": name for name in ("relu", "gelu", "silu", "tanh", "sigmoid")
}


@dataclass(frozen=True, slots=True)
class Product:
    """A product and what it has taken in.

    given
        Its arguments by name, with ids of the source.
    last
        The node whose place it takes; ``taken`` are the ids of all that it does.
    """

    node: IRNode
    given: Mapping[str, Any]
    last: IRNode
    taken: frozenset[int] = field(default_factory=frozenset)

    def takes(self, node: IRNode, passed: frozenset[int], **given: Any) -> Product:
        """With one more node, and the views before it."""
        return replace(
            self,
            given={**self.given, **given},
            last=node,
            taken=self.taken | passed | {self.last.id},
        )


def fuse_gemm(graph: IRGraph) -> IRGraph:
    """The graph with products that do what follows them."""
    nodes = graph.node_by_id()
    kept = {*graph.outputs, *graph.updates.values()}
    grown: dict[int, Product] = {}
    taken: set[int] = set()
    for node in graph.nodes:
        if node.op == GEMM and graph.values[node.outputs[0]].dtype in ("f32", "f64"):
            product = _grow(graph, nodes, kept, taken, node)
            if product.last is not node:
                grown[product.last.id] = product
                taken |= product.taken | {product.last.id}
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
    node: IRNode,
) -> Product:
    """The product with all that it can take in."""
    product = Product(node, arguments(node), node)
    value = graph.values[node.outputs[0]]
    passed: frozenset[int] = frozenset()
    while len(value.users) == 1 and value.id not in kept:
        user = nodes[value.users[0]]
        if user.id in taken or len(user.outputs) != 1:
            break
        made = graph.values[user.outputs[0]]
        if user.op in _VIEWS and _leaves_columns(value, made):
            passed |= {user.id}
        elif (rule := _RULES.get(user.op)) is not None and _fits(graph, product, value, made):
            found = rule(graph, product, user, value)
            if found is None:
                break
            product = product.takes(user, passed, **found)
            passed = frozenset()
        else:
            break
        value = made
    return product


def _leaves_columns(value: IRValue, made: IRValue) -> bool:
    """Whether a view of a contiguous value only divides its rows in another way."""
    return bool(made.shape) and made.shape[-1] == value.shape[-1] and made.strides is None


def _fits(graph: IRGraph, product: Product, value: IRValue, made: IRValue) -> bool:
    """Whether a result has the shape and layout that the product has."""
    return same_layout(value, made) and product.given["activation"] == 0


# --- what can follow -------------------------------------------------------------------------


def _add(
    graph: IRGraph, product: Product, node: IRNode, value: IRValue
) -> Mapping[str, Any] | None:
    """A vector as bias, or a tensor of the result's shape as residual."""
    given = arguments(node)
    operands = [given["self"], given["other"]]
    if given["alpha"] != 1 or not all(isinstance(item, Tensor) for item in operands):
        return None
    others = [item for item in operands if item != value.id]
    if len(others) != 1:
        return None
    other = graph.values[others[0]]
    if other.dtype != value.dtype:
        return None
    is_bias = other.shape == value.shape[-1:] and len(value.shape) > 1
    if is_bias and product.given["bias"] is None and other.strides is None:
        return {"bias": others[0]}
    if product.given["residual"] is None and same_layout(other, value):
        return {"residual": others[0]}
    return None


def _scale(
    graph: IRGraph, product: Product, node: IRNode, value: IRValue
) -> Mapping[str, Any] | None:
    """A number that the product alone is multiplied with, or divided by."""
    number = node.attrs.get("other")
    plain = product.given["bias"] is None and product.given["residual"] is None
    if not plain or not isinstance(number, (int, float)):
        return None
    factor = 1 / number if node.op.startswith("aten.div") and number else float(number)
    return {"alpha": product.given["alpha"] * factor} if number and math.isfinite(factor) else None


def _activate(
    graph: IRGraph, product: Product, node: IRNode, value: IRValue
) -> Mapping[str, Any] | None:
    name = _ACTIVATIONS[node.op]
    if node.attrs.get("approximate") == "tanh":
        name = "gelu_tanh"
    return {"activation": ACTIVATIONS.index(name)}


_Rule = Callable[[IRGraph, Product, IRNode, IRValue], Mapping[str, Any] | None]
_RULES: Mapping[str, _Rule] = {
    "aten.add.Tensor": _add,
    "aten.mul.Tensor": _scale,
    "aten.mul.Scalar": _scale,
    "aten.div.Tensor": _scale,
    "aten.div.Scalar": _scale,
    **dict.fromkeys(_ACTIVATIONS, _activate),
}


# --- writing ---------------------------------------------------------------------------------


def _write(rewriter: Rewriter, product: Product) -> None:
    """Append the product, and a view where what it took in came after one."""
    values = rewriter.source.values
    own, made = values[product.node.outputs[0]], values[product.last.outputs[0]]
    given = {
        key: Tensor(rewriter.now(item)) if isinstance(item, Tensor) else item
        for key, item in product.given.items()
    }
    residual = given["residual"]
    if residual is not None and rewriter.of(residual).shape != own.shape:
        size = {"size": list(own.shape)}
        (viewed,) = rewriter.call(
            "aten.view.default", [residual], size, product.last, rewriter.of(residual).name
        )
        assert viewed is not None
        given["residual"] = Tensor(viewed)
    inputs, attrs = call_attributes(GEMM, given)
    output = made if own.shape == made.shape else rewriter.fresh(own)
    rewriter.emit(GEMM, inputs, [output], attrs, product.last)
    if output is not made:
        size = {"size": list(made.shape)}
        rewriter.emit("aten.view.default", [output.id], [made], size, product.last)
