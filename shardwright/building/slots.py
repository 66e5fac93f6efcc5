"""What each device slot does: a graph of its own, and communication between its nodes.

A `SlotGraph` is written node by node with a Builder. Its ``items`` say in which order: nodes,
communications, and borders between repeated layers. Communications stand once in the list of all
and once in the items of each member, in the same order everywhere, so that no two slots can wait
for each other.

In a training step each item has a `PhaseStage` beside it: the phase and the stage whose work it is.
What a slot sends is the work of the stage that made it, what it receives of the stage that reads
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from shardwright.ir import Builder, IRNode, IRValue
from shardwright.ir.inference import Inference
from shardwright.pipeline import Phase
from shardwright.sharding.ranges import Ranges


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A slot's part in a communication: the value it gives and the value it gets."""

    device: str
    gives: int | None
    gets: int | None


@dataclass(frozen=True, slots=True, eq=False)
class LocalCommunication:
    """One collective, or one message, among members in the order of their index in the group.

    ``kind`` is a kind of the format; a message is ``send`` and has the sender first.
    """

    kind: str
    metadata: Mapping[str, int | str]
    members: tuple[GroupMember, ...]


@dataclass(frozen=True, slots=True)
class Border:
    """A task ends here: one repeated layer meets the next."""


BORDER = Border()

Item = IRNode | LocalCommunication | Border


@dataclass(frozen=True, slots=True)
class PhaseStage:
    """When an item is done: a phase of a training step, and the virtual stage it belongs to.

    Both are None where a graph runs forward once; ``stage`` is None in ``prepare`` and ``update``.
    """

    phase: Phase | None = None
    stage: int | None = None


@dataclass(slots=True)
class SlotGraph:
    """One slot: its graph, under construction, and the order of what it does.

    ``places`` has the place of each item; what is written goes to the place `at`.
    """

    device: str
    builder: Builder
    items: list[Item] = field(default_factory=list)
    places: list[PhaseStage] = field(default_factory=list)
    place: PhaseStage = field(default_factory=PhaseStage)
    noted: int = 0
    """How many nodes of the graph stand in ``items`` already."""

    @classmethod
    def empty(cls, device: str, inference: Inference) -> SlotGraph:
        """A slot that does nothing yet; slots share what is known of operators."""
        return cls(device, Builder(device, inference=inference))

    def value(self, value_id: int) -> IRValue:
        """A value of this slot."""
        return self.builder.graph.values[value_id]

    def zeros(self, name: str, shape: Sequence[int], dtype: str) -> IRValue:
        """State that begins with zeros."""
        value = self.builder.graph.new_value(name, shape, dtype, role="state")
        value.init = "zeros"
        return value

    def note(self) -> None:
        """Put the nodes that were written since the last item in order."""
        nodes = self.builder.graph.nodes
        self.items += nodes[self.noted :]
        self.places += [self.place] * (len(nodes) - self.noted)
        self.noted = len(nodes)

    def add(self, item: LocalCommunication | Border) -> None:
        """Put a communication or a border behind everything written so far."""
        self.note()
        self.items.append(item)
        self.places.append(self.place)

    def go(self, place: PhaseStage) -> None:
        """What is written from now on is done at ``place``."""
        if place != self.place:
            self.note()
            self.place = place

    def replace(self, nodes: Mapping[int, Sequence[IRNode]]) -> None:
        """Put other nodes in the place of some, by their ids."""
        placed = list(zip(self.items, self.places, strict=True))
        self.items, self.places = [], []
        for item, place in placed:
            found = nodes.get(item.id, [item]) if isinstance(item, IRNode) else [item]
            self.items += found
            self.places += [place] * len(found)

    @contextmanager
    def at(self, place: PhaseStage) -> Iterator[None]:
        """What is written within is done at ``place``."""
        before = self.place
        self.go(place)
        yield
        self.go(before)


@dataclass(frozen=True, slots=True)
class LocalSlice:
    """A slice of an original tensor as a value on a slot."""

    device: str
    value: int
    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Localized:
    """A whole graph as slots, and how its ends lie on them.

    inputs
        For each input of the graph that is read, by value id, the slices that slots take.
    outputs
        For each output of the graph, in order, slices that cover it, each once.
    updates
        Slices of stored values on slots, and the slices that replace them after a run.
    """

    slots: Mapping[str, SlotGraph]
    communications: Sequence[LocalCommunication]
    inputs: Mapping[int, Sequence[LocalSlice]]
    outputs: Sequence[Sequence[LocalSlice]]
    updates: Sequence[tuple[LocalSlice, LocalSlice]]
