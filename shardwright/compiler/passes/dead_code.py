"""Dropping what nothing needs.

Comes in: a graph. Goes out: the same without nodes on whose results neither an output nor an update
depends. What always holds: a node that draws random numbers stays, used or not, so that the numbers
that others draw are what they were; inputs and stored values stay, for callers know them.
"""

from __future__ import annotations

from shardwright.compiler.passes.rewriter import Rewriter, dead_nodes
from shardwright.ir import IRGraph


def remove_dead_code(graph: IRGraph) -> IRGraph:
    """The graph without nodes that nothing needs; the same where there are none."""
    dead = {node.id for node in dead_nodes(graph)}
    if not dead:
        return graph
    rewriter = Rewriter(graph)
    for node in graph.nodes:
        if node.id not in dead:
            rewriter.keep(node)
    return rewriter.finish()
