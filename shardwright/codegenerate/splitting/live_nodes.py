"""Which nodes of split slots are needed.

Comes in: the slots' graphs, and what must be there at the end of each. Goes out: the live nodes of
each slot. What always holds: a collective is live on all of its slots, or on none, and all go on
with what they get of it, so that their backwards meet too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from shardwright.clusters import Mesh
from shardwright.codegenerate.splitting.collectives import ALONE
from shardwright.codegenerate.splitting.split_holdings import StageHoldings
from shardwright.errors import CodegenError
from shardwright.ir import IRGraph, IRNode


def live_nodes(
    holdings: StageHoldings, mesh: Mesh, needed: Mapping[str, Collection[int]]
) -> dict[str, set[int]]:
    """The live nodes of each slot: a collective is live on all of its slots, or on none.

    Raises CodegenError where a slot has no use for what others need of a collective: its backward
    would not meet theirs.
    """
    graphs = {device: holdings.slots[device].builder.graph for device in mesh.devices}
    live: dict[str, set[int]] = {device: set() for device in mesh.devices}
    exchanges = [nodes for nodes in holdings.exchanges if live.keys() >= nodes.keys()]
    while True:
        before = sum(map(len, live.values()))
        for device, graph in graphs.items():
            live[device] = _walk(graph, needed[device], live[device])
        for nodes in exchanges:
            if any(node in live[device] for device, node in nodes.items()):
                for device, node in nodes.items():
                    live[device].add(node)
        if before == sum(map(len, live.values())):
            break
    _check_read(graphs, exchanges, live, needed)
    return live


def _walk(graph: IRGraph, needed: Collection[int], kept: Collection[int]) -> set[int]:
    """The nodes that some values and nodes depend on."""
    values, found = set(needed), set(kept)
    for node in reversed(graph.nodes):
        if node.id in found or not values.isdisjoint(node.outputs):
            found.add(node.id)
            values.update(node.inputs)
    return found


def _check_read(
    graphs: Mapping[str, IRGraph],
    exchanges: Sequence[Mapping[str, int]],
    live: Mapping[str, set[int]],
    needed: Mapping[str, Collection[int]],
) -> None:
    """Raise CodegenError where only some slots go on with what a collective gives all of them."""
    nodes = {device: graph.node_by_id() for device, graph in graphs.items()}
    for exchange in exchanges:
        members = [(device, nodes[device][node_id]) for device, node_id in exchange.items()]
        if members[0][1].op in ALONE or members[0][1].id not in live[members[0][0]]:
            continue
        unread = [
            device
            for device, node in members
            if not _is_read(graphs[device], node, live[device], needed[device])
        ]
        if unread:
            value = graphs[unread[0]].values[members[0][1].outputs[0]]
            raise CodegenError(
                f"slot {unread[0].partition(':')[2]} does nothing with {value.name!r}, which "
                f"others get by {members[0][1].op}; their gradients would wait for it: let the "
                "plan split what reads it otherwise"
            )


def _is_read(graph: IRGraph, node: IRNode, live: Collection[int], needed: Collection[int]) -> bool:
    made = graph.values[node.outputs[0]]
    return made.id in needed or any(user in live for user in made.users)
