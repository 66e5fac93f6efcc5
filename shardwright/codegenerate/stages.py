"""A whole graph and the partition of each of its nodes, as a `StageProgram`.

A stage's graph is valid; its nodes are ATen calls, registered operators and collectives; its
``inputs`` are the values of ``stage.inputs`` and its ``outputs`` those of ``stage.outputs``, in the
same order. A port that leaves one stage and enters another has one name in both. Of a training step
a program is the forward: inputs that only the rest reads (``lr``) are left out.

The stages run one after another give what the graph gives, new contents of buffers included; nodes
keep their modules and lines, and within a stage their order, so that random numbers are drawn in
it; what nobody needs is left out. A stored value is in every stage that reads it. One that the
graph gives new contents is in one partition alone, which changes it at the end of its forward: the
first that reads it. Others get it by a port.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from shardwright.clusters import Mesh
from shardwright.errors import CodegenError
from shardwright.ir import IRGraph, IRNode
from shardwright.ir.execute import describe_node
from shardwright.ir.graph import live_values
from shardwright.ir.structure import leaves
from shardwright.sharding.ranges import Ranges


@dataclass(frozen=True, slots=True)
class Port:
    """A tensor that enters or leaves a stage.

    name
        That of the model's input or output; of any other tensor the scope of the module that makes
        it and its name there, ``transformer.h.5/add_1``. Unique in the program.
    value
        Its id in the stage's graph.
    """

    name: str
    value: int


@dataclass(frozen=True, slots=True)
class Stage:
    """What one slot does of one partition.

    name
        The class's: ``Stage0``.
    inputs, outputs
        Sorted by name, each once.
    index
        The slot's place in the partition's mesh.
    mesh
        The partition's mesh, where its work is split.
    slices
        Stored values that are slices of the model's, by their names in the graph, which say where
        they stand in the stage: the model's name, the range of each dimension, and the shape of
        the whole. In the graph they have no placements; parts of one tensor have names of their
        own, ``weight_0``.
    """

    name: str
    graph: IRGraph
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    index: int = 0
    mesh: Mesh | None = None
    slices: Mapping[str, tuple[str, Ranges, tuple[int, ...]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StageProgram:
    """A model in partitions, topologically ordered.

    partitions
        For each, the stages of its slots, in the order of its mesh.
    inputs, outputs
        The ports' names of the model's tensors, in the model's flat order; an output may be the
        name of an input or stand twice.
    training
        Whether the model was captured in training mode.
    notes
        In words, where the partitions are not what the plan says.
    """

    name: str
    partitions: tuple[tuple[Stage, ...], ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    training: bool = False
    notes: tuple[str, ...] = ()


# --- partitions of nodes --------------------------------------------------------------------------


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


class EndNames(NamedTuple):
    """The names of a graph's inputs and outputs, in order."""

    inputs: Sequence[str]
    outputs: Sequence[str]

    @classmethod
    def of(cls, graph: IRGraph) -> Self:
        """Those of a model's arguments and results."""
        assert graph.in_structure is not None
        return cls([leaf.name for leaf in leaves(graph.in_structure)], graph.output_names)


class PortNames:
    """Names of ports by value id in the whole graph, each given once."""

    def __init__(self, graph: IRGraph, ends: EndNames) -> None:
        self.graph = graph
        self.found: dict[int, str] = {}
        self._taken: set[str] = set()
        for value_id, name in zip(graph.inputs, ends.inputs, strict=True):
            self._name(value_id, name)
        for value_id, name in zip(graph.outputs, ends.outputs, strict=True):
            self._name(value_id, name)

    def add(self, value_ids: set[int]) -> None:
        """Name what goes from stage to stage, in the order in which it is made."""
        for value in self.graph.stored():
            if value.id in value_ids:
                self._name(value.id, value.name)
        counts: Counter[tuple[str, str]] = Counter()
        for node in self.graph.nodes:
            for value_id in node.outputs:
                stem = _stem(self.graph.values[value_id].name)
                number = counts[node.scope, stem]
                counts[node.scope, stem] += 1
                if value_id in value_ids:
                    name = f"{stem}_{number}" if number else stem
                    self._name(value_id, f"{node.scope}/{name}" if node.scope else name)

    def _name(self, value_id: int, wanted: str) -> None:
        """Give a value without a name the wanted one, or the next free ``wanted__k``."""
        if value_id in self.found:
            return
        name, k = wanted, 1
        while name in self._taken:
            name, k = f"{wanted}__{k}", k + 1
        self._taken.add(name)
        self.found[value_id] = name


def _stem(name: str) -> str:
    """A value's name without the numbers that make it unique in its graph and in torch's."""
    return re.sub(r"(?<=\w)(_\d+)?(__\d+)?$", "", name)


@dataclass(slots=True, eq=False)
class Placed:
    """A node and its partition."""

    node: IRNode
    number: int


def together(graph: IRGraph, placed: Sequence[Placed]) -> None:
    """Move nodes so that buffers change where they are first read.

    What reads one waits for what changes it where it can, else that is done earlier. Raises
    CodegenError where layers of the model stand between them.
    """
    if graph.updates:
        moving = _Moving(graph, placed)
        for old, new in graph.updates.items():
            moving.settle(old, new)


class _Moving:
    """Moves nodes with all that they read, or with all that reads them."""

    def __init__(self, graph: IRGraph, placed: Sequence[Placed]) -> None:
        self.graph = graph
        self.makers = {value_id: found for found in placed for value_id in found.node.outputs}
        self.readers: dict[int, list[Placed]] = {}
        for found in placed:
            for value_id in dict.fromkeys(found.node.inputs):
                self.readers.setdefault(value_id, []).append(found)

    def settle(self, old: int, new: int) -> None:
        """Bring what reads old contents and what makes new ones together."""
        maker, readers = self.makers.get(new), self.readers.get(old, [])
        first = min(readers, key=lambda found: found.number, default=None)
        if maker is None or first is None or maker.number <= first.number:
            return
        early, late = first.number, maker.number
        waiting = self._reached(readers, self._users, lambda number: number < late)
        if waiting is not None:
            for found in waiting:
                found.number = late
            return
        earlier = self._reached([maker], self._sources, lambda number: number > early)
        if earlier is None:
            raise CodegenError(
                f"partition {early} reads the buffer {self.graph.values[old].name!r}, and its new "
                f"contents are made by {describe_node(maker.node)} in partition {late}, with "
                "layers of the model between; plan so that one partition has both"
            )
        for found in earlier:
            found.number = early

    def _reached(
        self,
        starts: Iterable[Placed],
        following: Callable[[Placed], Iterator[Placed]],
        beyond: Callable[[int], bool],
    ) -> list[Placed] | None:
        """What must move along with some nodes; None where a layer is among it."""
        found: dict[Placed, None] = {}
        pending = list(starts)
        while pending:
            placed = pending.pop()
            if placed in found or not beyond(placed.number):
                continue
            if any(self.graph.values[v].role == "param" for v in placed.node.inputs):
                return None
            found[placed] = None
            pending += following(placed)
        return list(found)

    def _users(self, placed: Placed) -> Iterator[Placed]:
        for value_id in placed.node.outputs:
            yield from self.readers.get(value_id, ())

    def _sources(self, placed: Placed) -> Iterator[Placed]:
        for value_id in placed.node.inputs:
            if value_id in self.makers:
                yield self.makers[value_id]


def live(graph: IRGraph, numbers: Sequence[int]) -> list[Placed]:
    """The nodes that something needs, each with its partition; partitions count from 0."""
    needed = live_values(graph, (*graph.outputs, *graph.updates.values()))
    pairs = zip(graph.nodes, numbers, strict=True)
    found = [(node, number) for node, number in pairs if not needed.isdisjoint(node.outputs)]
    order = {number: i for i, number in enumerate(sorted({number for _, number in found}))}
    return [Placed(node, order[number]) for node, number in found]


def check_order(graph: IRGraph, placed: Sequence[Placed]) -> None:
    """Raise CodegenError where a partition needs what a later one makes, or changes."""
    home = {value_id: found.number for found in placed for value_id in found.node.outputs}
    readers: dict[int, int] = {}
    for found in placed:
        for value_id in found.node.inputs:
            readers[value_id] = min(found.number, readers.get(value_id, found.number))
    home |= {old: readers.get(old, home.get(new, 0)) for old, new in graph.updates.items()}
    reads: list[tuple[int, int, IRNode | int]] = [
        (value_id, found.number, found.node) for found in placed for value_id in found.node.inputs
    ]
    reads += [(new, home[old], old) for old, new in graph.updates.items()]
    for value_id, number, reader in reads:
        if home.get(value_id, number) > number:
            said = (
                describe_node(reader)
                if isinstance(reader, IRNode)
                else f"the new contents of {graph.values[reader].name!r}"
            )
            raise CodegenError(
                f"{said} is in partition {number} and needs {graph.values[value_id].name!r} of "
                f"partition {home[value_id]}; plan so that nothing needs what a later partition "
                "makes"
            )
