"""Part of a graph as a graph of its own.

`extract` takes a set of nodes in execution order. Everything they read from outside, stored values
included, becomes an input; the values asked for become outputs. Positions, not names, decide the
order of inputs, so that equal layers give graphs that differ in names only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.ir.builder import Builder
from shardwright.ir.graph import IRGraph
from shardwright.ir.values import IRNode


@dataclass(frozen=True, slots=True)
class Subgraph:
    """A part as a graph, and which values of the whole its inputs and outputs are."""

    graph: IRGraph
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def extract(
    graph: IRGraph, nodes: Sequence[IRNode], outputs: Sequence[int], name: str = "part"
) -> Subgraph:
    """``nodes`` of ``graph``, in their order, as a graph that makes the values ``outputs``."""
    builder = Builder(name)
    mapping: dict[int, int] = {}
    inputs: list[int] = []
    for node in nodes:
        for value_id in node.inputs:
            if value_id not in mapping:
                copy = builder.copy_value(graph, graph.values[value_id], role="input")
                mapping[value_id] = copy.id
                inputs.append(value_id)
        builder.copy_node(graph, node, mapping)
    part = builder.finish([mapping[value_id] for value_id in outputs])
    return Subgraph(part, tuple(inputs), tuple(outputs))
