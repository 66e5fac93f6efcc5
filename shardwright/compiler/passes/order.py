"""The order of nodes when some of them are done together.

Comes in: a graph, and groups of its nodes that are to become one each. Goes out: groups and single
nodes in an order in which every value is made before it is read, as near to the graph's own as can
be: a group stands where its last node stood, or sooner where something reads it sooner.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from shardwright.errors import GraphError
from shardwright.ir import IRGraph, IRNode

Unit = Sequence[IRNode]
"""Nodes that are done together, in the graph's order."""


def units(graph: IRGraph, groups: Sequence[Sequence[IRNode]]) -> list[Unit]:
    """All nodes, in units: the groups, and each other node alone.

    Raises GraphError where two units need one another.
    """
    unit_of: dict[int, Unit] = {node.id: [node] for node in graph.nodes}
    for group in groups:
        unit_of |= {node.id: group for node in group}
    last = {id(unit): unit[-1].id for unit in unit_of.values()}
    order: list[Unit] = []
    done: set[int] = set()
    for node in graph.nodes:
        unit = unit_of[node.id]
        if last[id(unit)] == node.id and id(unit) not in done:
            _place(graph, unit, unit_of, done, order)
    return order


def _place(
    graph: IRGraph,
    unit: Unit,
    unit_of: Mapping[int, Unit],
    done: set[int],
    order: list[Unit],
) -> None:
    """Append a unit, after those that it needs and that are not there yet."""
    waiting: list[tuple[Unit, Iterator[Unit]]] = [(unit, _needs(graph, unit, unit_of))]
    open_units = {id(unit)}
    while waiting:
        current, needs = waiting[-1]
        needed = next((other for other in needs if id(other) not in done), None)
        if needed is None:
            waiting.pop()
            done.add(id(current))
            order.append(current)
        elif id(needed) in open_units:
            raise GraphError(f"{needed[0].op} and {current[0].op} need one another's results")
        else:
            open_units.add(id(needed))
            waiting.append((needed, _needs(graph, needed, unit_of)))


def _needs(graph: IRGraph, unit: Unit, unit_of: Mapping[int, Unit]) -> Iterator[Unit]:
    """The units that make what a unit reads."""
    for node in unit:
        for value_id in node.inputs:
            producer = graph.values[value_id].producer
            if producer is not None and unit_of[producer] is not unit:
                yield unit_of[producer]
