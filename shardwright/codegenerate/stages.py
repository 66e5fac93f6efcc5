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
from shardwright.codegenerate.writing.names import unused
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
    """The number of each node's partition, counted from 0.

    Places come in the order of their first nodes; a node without one goes to its first reader. A
    place that needs what a later one makes goes on in a partition of its own behind that.
    """
    ranks = {place: rank for rank, place in enumerate(dict.fromkeys(places)) if place is not None}
    position = {node.id: at for at, node in enumerate(graph.nodes)}
    found = [ranks.get(place, 0) for place in places]
    for at in reversed(range(len(found))):
        users = (user for v in graph.nodes[at].outputs for user in graph.values[v].users)
        if places[at] is None:
            found[at] = min((found[position[user]] for user in users), default=0)
    levels: list[tuple[int, int]] = []
    made: dict[int, tuple[int, int]] = {}
    for node, rank in zip(graph.nodes, found, strict=True):
        above = max((made[v] for v in node.inputs if v in made), default=(0, 0))
        level = above[0] if rank >= above[1] else above[0] + 1
        levels.append((level, rank))
        made.update(dict.fromkeys(node.outputs, levels[-1]))
    numbers = {key: number for number, key in enumerate(sorted(set(levels)))}
    return [numbers[key] for key in levels]


class EndNames(NamedTuple):
    """The names of a graph's inputs and outputs, in order."""

    inputs: Sequence[str]
    outputs: Sequence[str]

    @classmethod
    def of(cls, graph: IRGraph) -> Self:
        """Those of a model's arguments and results."""
        assert graph.in_structure is not None
        return cls([leaf.name for leaf in leaves(graph.in_structure)], graph.output_names)


def port_names(graph: IRGraph, ends: EndNames, value_ids: set[int]) -> dict[int, str]:
    """Names by value id for the graph's ends, and for what goes from stage to stage."""
    ports = {*graph.inputs, *graph.outputs, *value_ids}
    found: dict[int, str] = {}
    taken: set[str] = set()
    for value_id, name in _wanted_names(graph, ends):
        if value_id in ports and value_id not in found:
            found[value_id] = unused(name, taken, "__")
    return found


def _wanted_names(graph: IRGraph, ends: EndNames) -> Iterator[tuple[int, str]]:
    """Names of values: those of the ends first, then of others in the order of their making."""
    yield from zip(graph.inputs, ends.inputs, strict=True)
    yield from zip(graph.outputs, ends.outputs, strict=True)
    yield from ((value.id, value.name) for value in graph.stored())
    counts: Counter[tuple[str, str]] = Counter()
    for node in graph.nodes:
        for value_id in node.outputs:
            # Without the numbers that make it unique in its graph and in torch's.
            stem = re.sub(r"(?<=\w)(_\d+)?(__\d+)?$", "", graph.values[value_id].name)
            number = counts[node.scope, stem]
            counts[node.scope, stem] += 1
            name = f"{stem}_{number}" if number else stem
            yield value_id, f"{node.scope}/{name}" if node.scope else name


# --- partitions that can run ----------------------------------------------------------------------

Numbers = dict[int, int]
"""The partition of each node that something needs, by the node's id."""


def live(graph: IRGraph, numbers: Sequence[int]) -> Numbers:
    """The partitions of the nodes that something needs, counted from 0."""
    needed = live_values(graph, (*graph.outputs, *graph.updates.values()))
    pairs = zip(graph.nodes, numbers, strict=True)
    found = {node.id: number for node, number in pairs if not needed.isdisjoint(node.outputs)}
    order = {number: i for i, number in enumerate(sorted(set(found.values())))}
    return {node_id: order[number] for node_id, number in found.items()}


def together(graph: IRGraph, numbers: Numbers) -> None:
    """Move nodes so that buffers change where they are first read.

    What reads one waits for what changes it where it can, with all that reads that in turn; else
    what changes it is done earlier, with all that it reads. Raises CodegenError where layers of the
    model stand between them.
    """
    nodes = graph.node_by_id()

    def users(node: IRNode) -> Iterator[int]:
        return (user for v in node.outputs for user in graph.values[v].users if user in numbers)

    def sources(node: IRNode) -> Iterator[int]:
        made = (graph.values[value_id].producer for value_id in node.inputs)
        return (producer for producer in made if producer is not None)

    def reached(
        starts: Iterable[int],
        following: Callable[[IRNode], Iterator[int]],
        beyond: Callable[[int], bool],
    ) -> set[int] | None:
        """What must move along with some nodes; None where a layer is among it."""
        found: set[int] = set()
        pending = list(starts)
        while pending:
            node_id = pending.pop()
            if node_id in found or not beyond(numbers[node_id]):
                continue
            if any(graph.values[v].role == "param" for v in nodes[node_id].inputs):
                return None
            found.add(node_id)
            pending += following(nodes[node_id])
        return found

    for old, new in graph.updates.items():
        maker = graph.values[new].producer
        readers = [user for user in graph.values[old].users if user in numbers]
        early = min((numbers[reader] for reader in readers), default=None)
        if maker is None or early is None or (late := numbers[maker]) <= early:
            continue
        moved, there = reached(readers, users, late.__gt__), late
        if moved is None:
            moved, there = reached([maker], sources, early.__lt__), early
        if moved is None:
            raise CodegenError(
                f"partition {early} reads the buffer {graph.values[old].name!r}, and its new "
                f"contents are made by {describe_node(nodes[maker])} in partition {late}, with "
                "layers of the model between; plan so that one partition has both"
            )
        numbers.update(dict.fromkeys(moved, there))


def check_order(graph: IRGraph, numbers: Numbers) -> None:
    """Raise CodegenError where a partition needs what a later one makes, or changes."""
    placed = [(node, numbers[node.id]) for node in graph.nodes if node.id in numbers]
    home = {value_id: number for node, number in placed for value_id in node.outputs}
    readers: dict[int, int] = {}
    for node, number in placed:
        for value_id in node.inputs:
            readers[value_id] = min(number, readers.get(value_id, number))
    home |= {old: readers.get(old, home.get(new, 0)) for old, new in graph.updates.items()}
    reads = [(v, number, describe_node(node)) for node, number in placed for v in node.inputs]
    reads += [
        (new, home[old], f"the new contents of {graph.values[old].name!r}")
        for old, new in graph.updates.items()
    ]
    for value_id, number, reader in reads:
        if home.get(value_id, number) > number:
            raise CodegenError(
                f"{reader} is in partition {number} and needs {graph.values[value_id].name!r} of "
                f"partition {home[value_id]}; plan so that nothing needs what a later partition "
                "makes"
            )
