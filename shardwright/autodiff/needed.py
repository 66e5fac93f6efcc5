"""Which values of a graph a gradient goes through: the one analysis for costs and for building.

A value needs a gradient if it is trained, or is real or complex and made of one that needs it by an
operator that lets gradients through.
"""

from __future__ import annotations

from collections.abc import Iterable

from shardwright.ir import IRGraph, IRNode
from shardwright.ir.operators import is_marker
from shardwright.ir.tensor_meta import torch_dtype

STOPS = frozenset(("aten.detach.default",))
"""Operators that no gradient goes through."""


def trained_parameters(graph: IRGraph) -> frozenset[int]:
    """The parameters that an optimizer's marker replaces; all of a graph without markers."""
    markers = [node for node in graph.nodes if is_marker(node.op)]
    made = {value_id for node in markers for value_id in node.outputs}
    parameters = [value.id for value in graph.stored() if value.role == "param"]
    if not markers:
        return frozenset(v for v in parameters if can_have_gradient(graph, v))
    return frozenset(v for v in parameters if graph.updates.get(v) in made)


def needing_gradients(
    graph: IRGraph, trained: Iterable[int], nodes: Iterable[IRNode] | None = None
) -> set[int]:
    """The values that gradients of trained ones go through, these included, in ``nodes`` or all."""
    needing = set(trained)
    for node in graph.nodes if nodes is None else nodes:
        if node.op not in STOPS and not needing.isdisjoint(node.inputs):
            needing.update(v for v in node.outputs if can_have_gradient(graph, v))
    return needing


def can_have_gradient(graph: IRGraph, value_id: int) -> bool:
    """Whether a value's dtype is one that torch differentiates."""
    dtype = torch_dtype(graph.values[value_id].dtype)
    return dtype.is_floating_point or dtype.is_complex
