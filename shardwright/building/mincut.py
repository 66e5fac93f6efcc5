"""Which values of a block to keep for its backward: a minimum cut.

Keeping a value costs its bytes times a price, doing a node again costs its work. A value is there
for the backward where it is kept or its node done again; a node can be done again where what it
reads is there. The cheapest choice in which all is there that the backward reads is a minimum cut
of a network: each value and each node stands on the side of the sink where it is there, or done
again.

    source → node     the node's work: it is done again
    node → value      the value's bytes, at their price: it is kept
    value → node      no cut: what a node reads is there if the node is done again
    value → sink      no cut: what the backward reads is there

The higher the price, the less is kept.
"""

from __future__ import annotations

from collections.abc import Collection

from shardwright.building.activations import LayerActivations
from shardwright.ir import IRGraph
from shardwright.planning.cost import node_work

SOURCE, SINK = "source", "sink"


def kept_at(graph: IRGraph, block: LayerActivations, price: float) -> frozenset[int]:
    """The values of a block to keep if each byte costs ``price`` floating-point operations.

    What the block keeps in any case is not among them.
    """
    import networkx

    network = networkx.DiGraph()
    network.add_nodes_from((SOURCE, SINK))
    variable = {v for node in block.nodes for v in node.outputs} - block.fixed
    for node in block.nodes:
        network.add_edge(SOURCE, ("node", node.id), capacity=node_work(graph, node))
        for value_id in variable.intersection(node.outputs):
            cost = round(price * graph.values[value_id].nbytes)
            network.add_edge(("node", node.id), ("value", value_id), capacity=cost)
        for value_id in variable.intersection(node.inputs):
            network.add_edge(("value", value_id), ("node", node.id))
    for value_id in variable.intersection(block.needed):
        network.add_edge(("value", value_id), SINK)
    _, (_, there) = networkx.minimum_cut(network, SOURCE, SINK)
    return frozenset(_kept(block, variable, there))


def _kept(
    block: LayerActivations, variable: Collection[int], there: Collection[object]
) -> set[int]:
    """Values that are there though their node is not done again."""
    return {
        value_id
        for node in block.nodes
        for value_id in node.outputs
        if value_id in variable and ("value", value_id) in there and ("node", node.id) not in there
    }
