"""Parts of a training step's graph: its forward, and to which parameter the rest belongs.

A gradient, what clipping makes of it, its sum with an older one, the optimizer's state and the new
contents all belong to one parameter: they lie where it lies, and come in parts where it does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shardwright.ir import IRGraph, IRNode
from shardwright.ir.graph import forward_nodes
from shardwright.ir.operators import is_marker
from shardwright.ops.catalog import dimop_of


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


def parameters_of(graph: IRGraph) -> dict[int, int]:
    """The stored parameter that each value behind the backward belongs to, by value id."""
    found: dict[int, int] = {}
    before = {node.id for node in forward_nodes(graph)}
    for node in graph.nodes:
        if node.id not in before:
            found |= dict(_owned(graph, node, found))
    return found


def state_bytes(graph: IRGraph) -> dict[int, int]:
    """Bytes of the optimizer's state of each stored parameter that has any."""
    found: dict[int, int] = {}
    for value_id, parameter in parameters_of(graph).items():
        if graph.values[value_id].role == "state":
            found[parameter] = found.get(parameter, 0) + graph.values[value_id].nbytes
    return found


def _owned(graph: IRGraph, node: IRNode, known: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    if node.op == "Backward":
        yield from zip(node.outputs, gradient_parameters(graph, node), strict=True)
    elif node.op.endswith("_step"):
        parameters = node.inputs[1 : 1 + len(node.attrs["parameters"])]
        for listed in (node.inputs[1:], node.outputs):
            for i, value_id in enumerate(listed):
                parameter = parameters[i % len(parameters)]
                yield value_id, known.get(parameter, parameter)
    elif is_marker(node.op):
        gradients = node.outputs[len(node.outputs) - len(node.inputs) :]
        yield from zip(gradients, (known[v] for v in node.inputs), strict=True)
    else:
        yield from _owned_by_operator(graph, node, known)


def _owned_by_operator(
    graph: IRGraph, node: IRNode, known: Mapping[int, int]
) -> Iterator[tuple[int, int]]:
    """What has the shape of a gradient that an operator reads."""
    gradient = next((v for v in node.inputs if v in known), None)
    if gradient is not None and is_elementwise(graph, node):
        for value_id in (*node.inputs, *node.outputs):
            if graph.values[value_id].shape:
                yield value_id, known[gradient]


def gradient_parameters(graph: IRGraph, backward: IRNode) -> Iterator[int]:
    """The parameter of each gradient that a ``Backward`` node makes, by value id.

    A parameter in parts has its name listed for each, in the order of their ids.
    """
    parts: dict[str, list[int]] = {}
    for value in graph.stored():
        parts.setdefault(value.names[0], []).append(value.id)
    for name in backward.attrs["parameters"]:
        yield parts[name].pop(0)


def is_elementwise(graph: IRGraph, node: IRNode) -> bool:
    """Whether an operator of tensors of one shape, and numbers, works element by element.

    That is so where its dimension annotation splits every dimension, in all of them alike.
    """
    bound = None if is_marker(node.op) else dimop_of(graph, node)
    if bound is None or len(node.outputs) != 1:
        return False
    shape = bound.call.outputs[0]
    if any(found not in (shape, ()) for found in bound.call.inputs):
        return False
    flows = [bound.flow(identifier) for identifier in bound.identifiers]
    split = {flow.outputs[0].dim for flow in flows if flow.outputs[0].kind == "shard"}
    alike = all(
        carry.dim == flow.outputs[0].dim
        for flow in flows
        for carry in flow.inputs
        if carry.kind == "shard"
    )
    return alike and all(dim in split for dim, size in enumerate(shape) if size > 1)
