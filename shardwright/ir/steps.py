"""Training steps: graphs that hold markers beside operators.

A marker is a node whose ``op`` is no torch operator but a step of training (`Backward`,
`zero_grad`, `adamw_step`, …), which `building` expands. What always holds: a marker reads and
makes values like any node, so that what depends on one follows from the edges alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwright.ir.operators import is_marker
from shardwright.ir.values import IRNode

if TYPE_CHECKING:
    from shardwright.ir.graph import IRGraph


def is_step(graph: IRGraph) -> bool:
    """Whether the graph is a training step: whether it holds a marker."""
    return any(is_marker(node.op) for node in graph.nodes)


def forward_nodes(graph: IRGraph) -> list[IRNode]:
    """The operators that no marker comes before, in order: what can run before any `Backward`.

    In a graph that is no training step these are all nodes.
    """
    late: set[int] = set()
    found = []
    for node in graph.nodes:
        if is_marker(node.op) or not late.isdisjoint(node.inputs):
            late.update(node.outputs)
        else:
            found.append(node)
    return found
