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

    def given_by(self, device: str) -> tuple[int, ...]:
        """The value that a slot gives, or nothing."""
        members = (member for member in self.members if member.device == device)
        return tuple(member.gives for member in members if member.gives is not None)

    def got_by(self, device: str) -> tuple[int, ...]:
        """The value that a slot gets, or nothing."""
        members = (member for member in self.members if member.device == device)
        return tuple(member.gets for member in members if member.gets is not None)


@dataclass(frozen=True, slots=True)
class Border:
    """A task ends here: one repeated layer meets the next."""


BORDER = Border()

Item = IRNode | LocalCommunication | Border


def reads(device: str, item: Item) -> Sequence[int]:
    """The values of a slot that an item reads."""
    if isinstance(item, IRNode):
        return item.inputs
    return item.given_by(device) if isinstance(item, LocalCommunication) else ()


def makes(device: str, item: Item) -> Sequence[int]:
    """The values of a slot that an item makes."""
    if isinstance(item, IRNode):
        return item.outputs
    return item.got_by(device) if isinstance(item, LocalCommunication) else ()


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


# --- liveness -----------------------------------------------------------------------------------
#
# The slots are written node by node, before it is known who reads what: a copy of a node may stand
# on a slot that never needs it, and a value may be brought where nothing reads it. Seen from the
# end, an item is live where something of what it makes is an output, is new contents of a stored
# value, is given away in a live communication, or is read by a live node; a communication is live
# where one of its members reads what it gets.


@dataclass(slots=True)
class Live:
    """What is live on one slot; values are live where something live reads them.

    ``wanted`` are the values that must be there at the end.
    """

    wanted: set[int] = field(default_factory=set)
    values: set[int] = field(default_factory=set)
    nodes: set[int] = field(default_factory=set)
    communications: set[LocalCommunication] = field(default_factory=set)


def live_parts(localized: Localized) -> dict[str, Live]:
    """What is live on each slot."""
    walks = {
        device: _LivenessWalk(slot, len(slot.items)) for device, slot in localized.slots.items()
    }
    for part in _ends(localized):
        walks[part.device].live.wanted.add(part.value)
        walks[part.device].live.values.add(part.value)
    for communication in reversed(localized.communications):
        members = [(walks[member.device], member) for member in communication.members]
        for walk, _ in members:
            walk.back_to(communication)
        if any(member.gets in walk.live.values for walk, member in members):
            for walk, member in members:
                walk.live.communications.add(communication)
                if member.gives is not None:
                    walk.live.values.add(member.gives)
    for walk in walks.values():
        walk.back_to(None)
    return {device: walk.live for device, walk in walks.items()}


def _ends(localized: Localized) -> Iterator[LocalSlice]:
    """Slices of outputs, and new contents of stored values that something reads."""
    outputs = [part for parts in localized.outputs for part in parts]
    yield from outputs
    read = {(part.device, part.value) for part in outputs}
    for device, slot in localized.slots.items():
        read.update((device, value_id) for item in slot.items for value_id in reads(device, item))
    yield from (new for old, new in localized.updates if (old.device, old.value) in read)


@dataclass(slots=True)
class _LivenessWalk:
    """Goes through a slot's items from the end; ``at`` is behind the next one."""

    slot: SlotGraph
    at: int
    live: Live = field(default_factory=Live)

    def back_to(self, communication: LocalCommunication | None) -> None:
        """Mark the live nodes down to a communication, or to the beginning; goes past it."""
        while self.at > 0:
            self.at -= 1
            item = self.slot.items[self.at]
            if isinstance(item, IRNode):
                if not self.live.values.isdisjoint(item.outputs):
                    self.live.nodes.add(item.id)
                    self.live.values.update(item.inputs)
            elif isinstance(item, LocalCommunication):
                assert item is communication, "members meet communications in one order"
                return
