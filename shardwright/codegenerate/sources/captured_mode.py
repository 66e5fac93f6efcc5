"""Whether a model was in training mode when it was captured.

A graph that `capture` made says so. For others it follows from the operators that do one thing in
training and another in evaluation: layers of torch.nn first, which go by the mode, then calls of
functions, whose flag most models set to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shardwright.ir import IRGraph, IRNode

Attributes = Mapping[str, Any]

_FLAGS: dict[str, Callable[[Attributes], bool | None]] = {
    "aten.dropout.default": lambda attrs: attrs["train"],
    "aten.feature_dropout.default": lambda attrs: attrs["train"],
    "aten.alpha_dropout.default": lambda attrs: attrs["train"],
    "aten.feature_alpha_dropout.default": lambda attrs: attrs["train"],
    "aten.native_dropout.default": lambda attrs: attrs["train"],
    "aten.batch_norm.default": lambda attrs: attrs["training"],
    "aten.instance_norm.default": lambda attrs: attrs["use_input_stats"] or None,
    "aten._native_batch_norm_legit_functional.default": lambda attrs: attrs["training"],
    "aten.rrelu.default": lambda attrs: attrs["training"],
    "aten.scaled_dot_product_attention.default": lambda attrs: attrs["dropout_p"] > 0 or None,
}
"""What a call says of the mode; None where it says nothing."""

_LAYERS = "torch.nn.modules."


def captured_in_training(graph: IRGraph, *, otherwise: bool = False) -> bool:
    """Whether a graph is that of a model in training mode; ``otherwise`` where nothing says so."""
    if graph.training is not None:
        return graph.training
    said = [(node, flag) for node in graph.nodes if (flag := _flag(node)) is not None]
    layers = [flag for node, flag in said if node.scope_class.startswith(_LAYERS)]
    flags = layers or [flag for _, flag in said]
    return any(flags) if flags else otherwise


def _flag(node: IRNode) -> bool | None:
    found = _FLAGS.get(node.op)
    return None if found is None else found(node.attrs)
