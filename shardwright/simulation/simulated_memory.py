"""What a slot holds in simulated time, storage by storage.

In come the tensors that the slot's steps make, each with the storage it lies in, and which are let
go; out comes the most that it held at once, item by item. A storage lives as long as a tensor that
lies in it.

What always holds: nothing is let go that was not held, and the bytes held are never negative.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from shardwright.engine.slot_steps import SlotSteps
from shardwright.pipeline.schema import TensorInfo
from shardwright.planning.prediction.memory import SlotMemory

ITEMS = tuple(name for name in SlotMemory.__struct_fields__ if name != "updated")


@dataclass(slots=True, eq=False)
class SimulatedStorage:
    """Memory that tensors lie in; ``item`` is what it counts as, ``users`` how many lie there.

    A ``block`` stays with the slot when nobody uses it any more: memory for messages.
    """

    nbytes: int
    item: str
    users: int = 0
    block: MessageBlock | None = None


@dataclass(slots=True, eq=False)
class MessageBlock:
    """A piece of a slot's memory for messages, which others read where it is.

    ``seen`` are the slots that have read there, ``holders`` how many still do, or will.
    """

    nbytes: int
    seen: set[str]
    holders: int


class Ledger:
    """The memory of one slot."""

    def __init__(self, slot: str, constants: Mapping[str, tuple[int, str]]) -> None:
        self.slot = slot
        self.held = dict.fromkeys(ITEMS, 0)
        self.peak = dict.fromkeys(ITEMS, 0)
        self.most = -1
        self._storages: dict[Hashable, SimulatedStorage] = {}
        self._blocks: dict[int, list[MessageBlock]] = {}
        for name, (nbytes, item) in constants.items():
            self.hold(("constant", name), SimulatedStorage(nbytes, item))
        self.note(0)

    def __contains__(self, place: Hashable) -> bool:
        """Whether there is a tensor at a place."""
        return place in self._storages

    def storage(self, place: Hashable) -> SimulatedStorage:
        """What the tensor at a place lies in."""
        return self._storages[place]

    def hold(self, place: Hashable, storage: SimulatedStorage) -> None:
        """There is a tensor at ``place`` from now on."""
        self.drop(place)
        if not storage.users and storage.block is None:
            self.held[storage.item] += storage.nbytes
        storage.users += 1
        self._storages[place] = storage

    def drop(self, place: Hashable) -> None:
        """There is no tensor at ``place`` any more."""
        storage = self._storages.pop(place, None)
        if storage is None:
            return
        storage.users -= 1
        if not storage.users:
            if storage.block is not None:
                storage.block.holders -= 1
            else:
                self.held[storage.item] -= storage.nbytes

    def note(self, temporary: int) -> None:
        """This is held now, and so many bytes more for a moment."""
        total = sum(self.held.values()) + temporary
        if total > self.most:
            self.most = total
            self.peak = {**self.held, "temporaries": self.held["temporaries"] + temporary}

    # --- messages that stand where others read them -----------------------------------------

    def lend(self, nbytes: int, holders: int) -> MessageBlock:
        """A block for a message to so many; one that nobody reads any more, or a new one."""
        capacity = _capacity(nbytes)
        for block in self._blocks.setdefault(capacity, []):
            if not block.holders:
                block.holders = holders
                return block
        block = MessageBlock(capacity, {self.slot}, holders)
        self._blocks[capacity].append(block)
        self.held["messages"] += capacity
        return block

    def see(self, block: MessageBlock) -> SimulatedStorage:
        """A message of another slot; its memory is this one's too as soon as it reads there."""
        if self.slot not in block.seen:
            block.seen.add(self.slot)
            self.held["messages"] += block.nbytes
        return SimulatedStorage(block.nbytes, "messages", block=block)

    def memory(self) -> SlotMemory:
        """The most that was held at once."""
        return SlotMemory(**self.peak)


def _capacity(nbytes: int) -> int:
    """As the workers' arenas round it: sixteenths of a power of two."""
    step = max(64, 1 << nbytes.bit_length() >> 4)
    return -(-nbytes // step) * step


def constant_items(slot: SlotSteps) -> dict[str, tuple[int, str]]:
    """The bytes of a slot's constants, and what they count as."""
    sums = {*slot.replacements.assigned, *slot.replacements.zeroed}
    return {name: (info.nbytes, _item(info, name in sums)) for name, info in slot.constants.items()}


def _item(info: TensorInfo, is_sum: bool) -> str:
    name = info.origin.name if info.origin else info.value.name if info.value else ""
    if name.startswith("optimizer."):
        return "optimizer"
    return "gradients" if is_sum or name.startswith("grad.") else "parameters"
