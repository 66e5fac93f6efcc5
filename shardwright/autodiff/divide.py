"""A recorded call and its gradient, divided into what happens forward and what backward.

Comes in: a graph from a call's inputs and its outputs' gradients to its outputs and its inputs'
gradients. Goes out: a forward graph, where something has to be saved, and a backward graph. What
always holds: the forward does what the outputs need, and nothing else; the backward does all the
rest, and again what costs nothing: views, copies and constants of what it has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import torch

from shardwright.ir import Builder, IRGraph, IRNode
from shardwright.ir.operators import resolve
from shardwright.torch_internals import operator_of, schema_of


class Parts(NamedTuple):
    """The two graphs; ``reads`` are the values that ``backward`` takes, ``saved`` those among them
    that ``forward`` gives beside the outputs. Values are those of the graph that was divided."""

    forward: IRGraph | None
    backward: IRGraph
    reads: list[int]
    saved: list[int]


def divide(
    graph: IRGraph,
    inputs: Sequence[int],
    outputs: Sequence[int],
    gradients: Sequence[int],
    known: Collection[int],
) -> Parts:
    """Divide ``graph`` between ``outputs`` and ``gradients``.

    ``known`` are values that the backward has at no cost: inputs, outputs, outputs' gradients.
    """
    forward = ancestors(graph, outputs)
    saved: dict[int, None] = {}
    backward: set[int] = set()
    needed = [value_id for value_id in gradients if value_id not in known]
    producers = _producers(graph)
    while needed:
        value_id = needed.pop()
        node = producers[value_id]
        if node.id in forward and not _costs_nothing(node):
            saved[value_id] = None
        elif node.id not in backward:
            backward.add(node.id)
            needed += [read for read in node.inputs if read not in known]
    nodes = [node for node in graph.nodes if node.id in backward]
    made = {value_id for node in nodes for value_id in node.outputs}
    wanted = (*(v for node in nodes for v in node.inputs), *gradients)
    reads = list(dict.fromkeys(v for v in wanted if v not in made))
    kept = sorted(saved)
    return Parts(
        _part(graph, forward, inputs, [*outputs, *kept]) if kept else None,
        _part(graph, backward, reads, gradients),
        reads,
        kept,
    )


def ancestors(graph: IRGraph, value_ids: Iterable[int]) -> set[int]:
    """The ids of the nodes that some values depend on."""
    live, found = set(value_ids), set()
    for node in reversed(graph.nodes):
        if not live.isdisjoint(node.outputs):
            live.update(node.inputs)
            found.add(node.id)
    return found


def _producers(graph: IRGraph) -> dict[int, IRNode]:
    return {value_id: node for node in graph.nodes for value_id in node.outputs}


def _costs_nothing(node: IRNode) -> bool:
    """Whether a node only looks at its input anew, copies it, or makes a constant."""
    overload = resolve(node.op)
    if torch.Tag.nondeterministic_seeded in overload.tags:
        return False
    views = any(item.alias_info is not None for item in schema_of(overload).returns)
    return views or operator_of(overload) in ("_unsafe_view", "clone") or not node.inputs


def _part(
    graph: IRGraph, chosen: Collection[int], inputs: Sequence[int], outputs: Sequence[int]
) -> IRGraph:
    """The chosen nodes as a graph of their own."""
    builder = Builder(graph.name)
    mapping = {v: builder.copy_value(graph, graph.values[v], role="input").id for v in inputs}
    for node in graph.nodes:
        if node.id in chosen:
            builder.copy_node(graph, node, mapping)
    return builder.finish([mapping[value_id] for value_id in outputs])
