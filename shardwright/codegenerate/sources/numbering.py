"""Partitions from the places where nodes run: numbers such that none needs a later one.

Comes in: a graph, and for each node the place where it runs, or None where that is open. Goes out:
a number for each node. Nodes of one place have one number as far as that can be; where values go
to another place and come back, the place has several. What always holds: no node reads what one of
a higher number makes.

Places are in the order in which their nodes stand, on average. A node whose place is open runs
where it is first read. So does what a place makes of inputs and stored values alone, as lookups in
a part of a table, where only one other place reads it, and an earlier one.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from shardwright.ir import IRGraph


def partition_numbers(graph: IRGraph, places: Sequence[Hashable | None]) -> list[int]:
    """The number of each node's partition, counted from 0."""
    ranks = _ranks(places)
    settled = _settled(graph, [None if place is None else ranks[place] for place in places])
    levels: list[tuple[int, int]] = []
    made: dict[int, tuple[int, int]] = {}
    for node, rank in zip(graph.nodes, settled, strict=True):
        above = max((made[v] for v in node.inputs if v in made), default=(0, 0))
        level = above[0] if rank >= above[1] else above[0] + 1
        levels.append((level, rank))
        made.update(dict.fromkeys(node.outputs, levels[-1]))
    numbers = {key: number for number, key in enumerate(sorted(set(levels)))}
    return [numbers[key] for key in levels]


def _ranks(places: Sequence[Hashable | None]) -> dict[Hashable, int]:
    """The place of each place among all, by where its nodes stand on average."""
    positions: dict[Hashable, list[int]] = {}
    for position, place in enumerate(places):
        if place is not None:
            positions.setdefault(place, []).append(position)
    order = sorted(positions, key=lambda place: sum(positions[place]) / len(positions[place]))
    return {place: rank for rank, place in enumerate(order)}


def _settled(graph: IRGraph, ranks: Sequence[int | None]) -> list[int]:
    """A rank for every node: those that are open, or are free to, go to their readers."""
    position = {node.id: at for at, node in enumerate(graph.nodes)}
    free = _free(graph, ranks)
    found = [0 if rank is None else rank for rank in ranks]
    for at in reversed(range(len(found))):
        made = graph.nodes[at].outputs
        readers = {found[position[user]] for v in made for user in graph.values[v].users}
        if readers and ranks[at] is None:
            found[at] = min(readers)
        elif len(readers) == 1 and free[at]:
            found[at] = min(found[at], *readers)
    return found


def _free(graph: IRGraph, ranks: Sequence[int | None]) -> list[bool]:
    """Which nodes need nothing of another place, and make nothing that is needed at the end."""
    ends = {*graph.outputs, *graph.updates.values()}
    places: dict[int, int | None] = {}
    """Of values that are made of inputs and stored values alone, at one place."""
    found = []
    for node, rank in zip(graph.nodes, ranks, strict=True):
        made = (v for v in node.inputs if graph.values[v].producer is not None)
        alone = all(places.get(value_id, -1) == rank for value_id in made)
        if alone:
            places.update(dict.fromkeys(node.outputs, rank))
        found.append(alone and ends.isdisjoint(node.outputs))
    return found
