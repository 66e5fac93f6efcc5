"""Dropping what nothing needs.

Comes in: a graph. Goes out: the same without nodes on whose results neither an output nor an update
depends. What always holds: a node that draws random numbers stays, used or not, so that the numbers
that others draw are what they were; inputs and stored values stay, for callers know them.
"""

from __future__ import annotations

from shardwright.exec.passes.rewriter import Rewriter
from shardwright.ir import IRGraph


def remove_dead_code(graph: IRGraph) -> IRGraph:
    """The graph without nodes that nothing needs."""
    rewriter = Rewriter(graph)
    for node in graph.nodes:
        rewriter.keep(node)
    return rewriter.finish(prune=True)
