"""Which nodes can be done together without any of them needing another's result too soon.

Comes in: nodes in order, and which of them fuse with what they read. Goes out: groups. What always
holds: doing a group as one makes no cycle. Each node has a level, which rises along every edge that
does not fuse; nodes are together only if edges that fuse join them and they have one level, so that
no path leaves a group and comes back. A node that one other alone reads may join it higher up: all
that leaves it goes through that one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from shardwright.ir import IRGraph, IRNode

Fuses = Callable[[int, IRNode], bool]
"""Whether a value, which a node makes, and a node that reads it may be in one group."""


def groups(
    graph: IRGraph, nodes: Sequence[IRNode], fuses: Fuses, kept: Collection[int]
) -> list[list[IRNode]]:
    """The nodes in groups, each in order; many of them alone.

    ``nodes`` are all of the graph, or such that no path between two of them leaves them. ``kept``
    are values that something beside the graph's nodes reads.
    """
    inside = {node.id: node for node in nodes}
    together = {
        node.id: [
            graph.values[value_id].producer
            for value_id in dict.fromkeys(node.inputs)
            if graph.values[value_id].producer in inside and fuses(value_id, node)
        ]
        for node in nodes
    }
    levels = _levels(graph, nodes, together)
    _wait(graph, nodes, together, levels, kept)
    root: dict[int, int] = {}

    def find(node_id: int) -> int:
        while root[node_id] != node_id:
            root[node_id] = root[root[node_id]]
            node_id = root[node_id]
        return node_id

    for node in nodes:
        root[node.id] = node.id
        for producer in together[node.id]:
            if producer is not None and levels[producer] == levels[node.id]:
                root[find(producer)] = node.id
    found: dict[int, list[IRNode]] = {}
    for node in nodes:
        found.setdefault(find(node.id), []).append(node)
    return list(found.values())


def _levels(
    graph: IRGraph, nodes: Sequence[IRNode], together: Mapping[int, Collection[int | None]]
) -> dict[int, int]:
    """A number for each node that rises along every edge that does not fuse."""
    levels: dict[int, int] = {}
    for node in nodes:
        level, fusing = 0, together[node.id]
        for value_id in node.inputs:
            producer = graph.values[value_id].producer
            if producer in levels:
                level = max(level, levels[producer] + (producer not in fusing))
        levels[node.id] = level
    return levels


def _wait(
    graph: IRGraph,
    nodes: Sequence[IRNode],
    together: Mapping[int, Collection[int | None]],
    levels: dict[int, int],
    kept: Collection[int],
) -> None:
    """Raise what one other node alone reads to its level, where that keeps no more alive."""
    for node in reversed(nodes):
        if len(node.outputs) != 1:
            continue
        made = graph.values[node.outputs[0]]
        if len(made.users) != 1 or made.id in kept or made.users[0] not in levels:
            continue
        (user,) = made.users
        held = [graph.values[value_id] for value_id in set(node.inputs)]
        size = sum(value.nbytes for value in held if value.role == "tmp")
        if node.id in together[user] and size <= made.nbytes:
            levels[node.id] = levels[user]
