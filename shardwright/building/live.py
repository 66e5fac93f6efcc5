"""What of the slots' work is read in the end.

The slots are written node by node, before it is known who reads what: a copy of a node may stand on
a slot that never needs it, and a value may be brought where nothing reads it. Seen from the end, an
item is live where something of what it makes is an output, is new contents of a stored value, is
given away in a live communication, or is read by a live node; a communication is live where one of
its members reads what it gets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from shardwright.building.slots import Item, LocalCommunication, Localized, LocalSlice, SlotGraph
from shardwright.ir import IRNode


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
        read.update((device, value_id) for item in slot.items for value_id in _reads(device, item))
    yield from (new for old, new in localized.updates if (old.device, old.value) in read)


def _reads(device: str, item: Item) -> Sequence[int]:
    """The values of a slot that an item reads."""
    if isinstance(item, IRNode):
        return item.inputs
    return given_by(device, item) if isinstance(item, LocalCommunication) else ()


def given_by(device: str, communication: LocalCommunication) -> tuple[int, ...]:
    """The value that a slot gives to a communication, or nothing."""
    members = (member for member in communication.members if member.device == device)
    return tuple(member.gives for member in members if member.gives is not None)


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
