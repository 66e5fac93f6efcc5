"""Which values of a graph a gradient goes through.

What always holds: a value needs a gradient if it is trained, or is of floating point and made of
one that needs it by an operator that lets gradients through.
"""

from __future__ import annotations

from collections.abc import Collection

from shardwright.ir import IRGraph
from shardwright.ir.dtypes import torch_dtype
from shardwright.ir.operators import is_marker

STOPS = frozenset(("aten.detach.default",))
"""Operators that no gradient goes through."""


def trained_parameters(graph: IRGraph) -> frozenset[int]:
    """The parameters that an optimizer's marker replaces; all of a graph without markers."""
    markers = [node for node in graph.nodes if is_marker(node.op)]
    made = {value_id for node in markers for value_id in node.outputs}
    parameters = [value.id for value in graph.stored() if value.role == "param"]
    if not markers:
        return frozenset(v for v in parameters if _is_real(graph, v))
    return frozenset(v for v in parameters if graph.updates.get(v) in made)


def needing_gradients(graph: IRGraph, trained: Collection[int]) -> set[int]:
    """The values that the gradient of a trained parameter goes through, and those parameters."""
    needing = set(trained)
    for node in graph.nodes:
        if node.op not in STOPS and not needing.isdisjoint(node.inputs):
            needing.update(v for v in node.outputs if _is_real(graph, v))
    return needing


def _is_real(graph: IRGraph, value_id: int) -> bool:
    return torch_dtype(graph.values[value_id].dtype).is_floating_point
