"""The forward of a training step by itself: what is cut in stages and split over slots."""

from __future__ import annotations

from shardwright.ir import IRGraph
from shardwright.ir.graph import forward_nodes


def forward_view(graph: IRGraph) -> IRGraph:
    """The forward of a graph, with the ids of the graph; the graph itself where that is all.

    What later nodes read of it, the loss, counts as its output.
    """
    nodes = forward_nodes(graph)
    if len(nodes) == len(graph.nodes):
        return graph
    inside = {node.id for node in nodes}
    values = {
        value.id: value.wired(value.producer, [user for user in value.users if user in inside])
        for value in graph.values.values()
        if value.producer is None or value.producer in inside
    }
    read_later = (v for node in graph.nodes if node.id not in inside for v in node.inputs)
    made = (v for v in (*graph.outputs, *read_later) if v in values)
    return IRGraph(
        graph.name,
        values,
        nodes,
        inputs=graph.inputs,
        outputs=list(dict.fromkeys(v for v in made if values[v].producer is not None)),
        updates={old: new for old, new in graph.updates.items() if new in values},
        tensors=graph.tensors,
    )
