"""Which part of a partition each node of a drawn graph is in.

Comes in: a mapping from node ids, or whatever has the stage of each forward node. Goes out:
`Parts`. What always holds: every node in it is the graph's; a node that it lacks is in no part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from shardwright.errors import DrawError
from shardwright.ir.steps import forward_nodes
from shardwright.ir.values import IRNode

if TYPE_CHECKING:
    from shardwright.ir.graph import IRGraph


class HasStages(Protocol):
    """Whatever says in which stage each forward node is, in the graph's order: a partition."""

    @property
    def stages(self) -> tuple[int, ...]:
        """A number a node, from 0 up."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The part of each node, by node id, and what parts are called, by number.

    A part without a name is ``part 3``.
    """

    numbers: Mapping[int, int] = field(default_factory=dict)
    names: Mapping[int, str] = field(default_factory=dict)

    @property
    def known(self) -> list[int]:
        """The numbers of the parts that have nodes, ascending."""
        return sorted(set(self.numbers.values()))

    def name(self, number: int) -> str:
        """What a part is called."""
        return self.names.get(number, f"part {number}")


def parts_of(graph: IRGraph, partition: Parts | HasStages | Mapping[int, int] | None) -> Parts:
    """The parts that a partition has of a graph. Raises DrawError where it is of another graph."""
    if partition is None:
        return Parts()
    if isinstance(partition, Mapping):
        partition = Parts(partition)
    if isinstance(partition, Parts):
        _check_ids(graph, "partition", partition.numbers)
        return partition
    nodes = forward_nodes(graph)
    if len(partition.stages) != len(nodes):
        raise DrawError(
            f"partition has {len(partition.stages)} stages' numbers, the graph {graph.name!r} has "
            f"{len(nodes)} forward nodes; give the partition of this graph, or draw a plan with "
            "sw.draw(graph, plan=plan)"
        )
    numbers = {node.id: stage for node, stage in zip(nodes, partition.stages, strict=True)}
    return Parts(numbers, {stage: f"stage {stage}" for stage in set(partition.stages)})


def check_times(graph: IRGraph, times: Mapping[int, float]) -> None:
    """Raise DrawError where times are none, or of nodes that the graph lacks."""
    _check_ids(graph, "times", times)
    for node_id, time in times.items():
        if not (time >= 0 and math.isfinite(time)):
            raise DrawError(f"times: node {node_id} takes {time!r}; expected milliseconds, from 0")


def _check_ids(graph: IRGraph, what: str, given: Mapping[int, object]) -> None:
    unknown = given.keys() - {node.id for node in graph.nodes}
    if unknown:
        raise DrawError(
            f"{what}: the graph {graph.name!r} has no node {min(unknown)}; keys are the ids of its "
            "nodes"
        )


def in_order_of_parts(graph: IRGraph, parts: Parts) -> tuple[list[IRNode], bool]:
    """The nodes in an order in which they can run, and whether each part's stand together in it.

    They do where no part reads what a later one makes; nodes in no part come last.
    """
    if not parts.numbers:
        return list(graph.nodes), False

    def number(node: IRNode) -> float:
        return parts.numbers.get(node.id, math.inf)

    if not _flows_on(graph, {node.id: number(node) for node in graph.nodes}):
        return list(graph.nodes), False
    return sorted(graph.nodes, key=number), True


def _flows_on(graph: IRGraph, numbers: Mapping[int, float]) -> bool:
    """Whether no part reads what a later one makes."""
    return all(
        numbers[value.producer] <= numbers[user]
        for value in graph.values.values()
        if value.producer is not None
        for user in value.users
    )


def runs(nodes: Sequence[IRNode], parts: Parts) -> list[tuple[int | None, list[IRNode]]]:
    """Nodes that stand next to one another in one part, with its number."""
    found: list[tuple[int | None, list[IRNode]]] = []
    for node in nodes:
        number = parts.numbers.get(node.id)
        if not found or found[-1][0] != number:
            found.append((number, []))
        found[-1][1].append(node)
    return found
