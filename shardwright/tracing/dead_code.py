"""Dropping what nothing needs.

Comes in: a graph that is being built, with its outputs and updates. Goes out: the same graph
without nodes whose results nobody uses and without stored values that nobody uses. What always
holds: outputs and updates are what they were, and the random numbers too, since a node that
draws some, if only in training, stays, used or not, as do nodes without results, which are there
for an effect.
"""

from __future__ import annotations

from collections.abc import Iterable

from shardwright.ir.graph import IRGraph
from shardwright.ir.operators import is_marker, is_random
from shardwright.ir.values import IRNode


def remove_dead_code(graph: IRGraph, needed: Iterable[int]) -> None:
    """Drop nodes and stored values that the values ``needed`` do not depend on."""
    live = live_values(graph, needed)
    dropped = {node.id for node in graph.nodes if not _is_kept(node, live)}
    graph.nodes[:] = (node for node in graph.nodes if node.id not in dropped)
    for value_id, value in list(graph.values.items()):
        if value_id in live or value.role == "input":
            value.users = [user for user in value.users if user not in dropped]
        else:
            del graph.values[value_id]
            graph.tensors.pop(value_id, None)


def live_values(graph: IRGraph, needed: Iterable[int]) -> set[int]:
    """The values ``needed`` and all that they, or what has an effect, depend on."""
    live = set(needed)
    for node in reversed(graph.nodes):
        if _is_kept(node, live):
            live.update(node.inputs, node.outputs)
    return live


def _is_kept(node: IRNode, live: set[int]) -> bool:
    return _has_effect(node) or not live.isdisjoint(node.outputs)


def _has_effect(node: IRNode) -> bool:
    return not node.outputs or is_marker(node.op) or is_random(node, in_training=True)
