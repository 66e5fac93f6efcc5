"""Nodes that several stages do, each for itself, so that nothing is sent.

Comes in: a graph, the stage of each of its first nodes, and which nodes stages do again. Goes out:
the graph with a copy of each behind the original, read by what stands in its stage. What always
holds: every other value and node keeps its id, and the graph computes the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import msgspec

from shardwright.errors import PlanError
from shardwright.ir import IRGraph, IRNode


class Copy(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True):
    """A node that another stage does again for itself: its position, and that stage."""

    node: int
    stage: int


def with_copies(
    graph: IRGraph, copies: Sequence[Copy], stages: Sequence[int]
) -> tuple[IRGraph, list[int]]:
    """The graph with these copies, and the stage of each of its first nodes.

    ``stages`` are those of the first nodes of the graph as it is; those behind them read originals.
    """
    if not copies:
        return graph, list(stages)
    writing = _CopyWriter(graph)
    found = []
    by_node = {at: list(same) for at, same in groupby(sorted(copies), key=lambda copy: copy.node)}
    for position, node in enumerate(graph.nodes):
        stage = stages[position] if position < len(stages) else None
        writing.add(node, stage)
        found += [stage] if stage is not None else []
        for copy in by_node.get(position, ()):
            writing.add_copy(node, copy.stage)
            found.append(copy.stage)
    return writing.finish(), found


def copied(graph: IRGraph, copies: Sequence[Copy], stages: Sequence[int]) -> IRGraph:
    """As `with_copies`, from the stages of the result. Raises PlanError where they do not fit."""
    originals = list(stages)
    for copy in sorted(copies, reverse=True):
        at = copy.node + sum(other < copy for other in copies) + 1
        if at >= len(originals) or originals.pop(at) != copy.stage:
            raise PlanError(
                f"the plan's copy of node {copy.node} in stage {copy.stage} is not where its "
                "stages have it; plan again"
            )
    return with_copies(graph, copies, originals)[0]


class _CopyWriter:
    """A graph written again, under the ids it has."""

    def __init__(self, graph: IRGraph) -> None:
        self._graph = replace(
            graph,
            values={v: replace(value, users=[]) for v, value in graph.values.items()},
            nodes=[],
            _taken=dict(graph._taken),
        )
        self._copies: dict[tuple[int, int], int] = {}
        """The copy of a value that a stage has."""

    def add(self, node: IRNode, stage: int | None) -> None:
        """The node itself, reading what its stage has."""
        self._append(replace(node, inputs=self._read(node, stage)))

    def add_copy(self, node: IRNode, stage: int) -> None:
        """The node once more, for a stage."""
        outputs = []
        for value_id in node.outputs:
            value = self._graph.values[value_id]
            made = self._graph.new_value(
                value.name, value.shape, value.dtype, device=value.device, strides=value.strides
            )
            self._copies[value_id, stage] = made.id
            outputs.append(made.id)
        again = replace(
            node, id=self._graph.fresh_id(), inputs=self._read(node, stage), outputs=outputs
        )
        for value_id in outputs:
            self._graph.values[value_id].producer = again.id
        self._append(again)

    def _read(self, node: IRNode, stage: int | None) -> list[int]:
        if stage is None:
            return list(node.inputs)
        return [self._copies.get((value_id, stage), value_id) for value_id in node.inputs]

    def _append(self, node: IRNode) -> None:
        for value_id in dict.fromkeys(node.inputs):
            self._graph.values[value_id].users.append(node.id)
        self._graph.nodes.append(node)

    def finish(self) -> IRGraph:
        """The graph."""
        return self._graph
