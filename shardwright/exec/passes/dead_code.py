"""Dropping what nothing needs.

Comes in: a graph. Goes out: the same without nodes on whose results neither an output nor an update
depends. What always holds: a node that draws random numbers stays, used or not, so that the numbers
that others draw are what they were; inputs and stored values stay, for callers know them.
"""

from __future__ import annotations

from shardwright.exec.passes.rewriter import Rewriter
from shardwright.ir import IRGraph
from shardwright.tracing.dead_code import live_values


def remove_dead_code(graph: IRGraph) -> IRGraph:
    """The graph without nodes that nothing needs."""
    live = live_values(graph, [*graph.outputs, *graph.updates.values()])
    rewriter = Rewriter(graph)
    for node in graph.nodes:
        if not live.isdisjoint(node.outputs):
            rewriter.keep(node)
    return rewriter.finish()
