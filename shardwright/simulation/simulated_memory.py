"""What a slot holds in simulated time, storage by storage.

A storage lives as long as a tensor that lies in it; the engine's values are the storages
themselves, and `HeldValues` are where it keeps them. A `Ledger` knows the most that was held at
once, item by item.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardwright.costs.predict import SlotMemory
from shardwright.engine.program import SlotProgram
from shardwright.pipeline.schema import TensorInfo

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

    def __init__(self, slot: str) -> None:
        self.slot = slot
        self.held = dict.fromkeys(ITEMS, 0)
        self.peak = dict.fromkeys(ITEMS, 0)
        self.most = -1
        self._blocks: dict[int, list[MessageBlock]] = {}

    def hold(self, storage: SimulatedStorage) -> None:
        """One more tensor lies in a storage from now on."""
        if not storage.users and storage.block is None:
            self.held[storage.item] += storage.nbytes
        storage.users += 1

    def drop(self, storage: SimulatedStorage) -> None:
        """There is one tensor less in a storage."""
        storage.users -= 1
        if not storage.users:
            if storage.block is not None:
                storage.block.holders -= 1
            else:
                self.held[storage.item] -= storage.nbytes

    def note_made(self, storage: SimulatedStorage) -> None:
        """What is held now is noted with a storage that is about to be."""
        extra = 0 if storage.users or storage.block is not None else storage.nbytes
        self.held[storage.item] += extra
        self.note(0)
        self.held[storage.item] -= extra

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


class HeldValues(dict[Any, SimulatedStorage]):
    """Storages by what lies in them; a ledger knows of those that are here."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger

    def __setitem__(self, key: Any, storage: SimulatedStorage) -> None:
        self.pop(key, None)
        self._ledger.hold(storage)
        super().__setitem__(key, storage)

    def pop(self, key: Any, default: Any = None) -> Any:
        """Let go of what lies at a key."""
        storage = super().pop(key, None)
        if storage is not None:
            self._ledger.drop(storage)
        return default if storage is None else storage

    def clear(self) -> None:
        """Let go of all."""
        for storage in self.values():
            self._ledger.drop(storage)
        super().clear()


def hold_constants(ledger: Ledger, program: SlotProgram) -> HeldValues:
    """A slot's constants, each in a storage of the item that it counts as."""
    found = HeldValues(ledger)
    for name, info in program.constants.items():
        found[name] = SimulatedStorage(info.nbytes, _item(info, name in program.sums))
    return found


def _item(info: TensorInfo, is_sum: bool) -> str:
    name = info.origin.name if info.origin else info.value.name if info.value else ""
    if name.startswith("optimizer."):
        return "optimizer"
    return "gradients" if is_sum or name.startswith("grad.") else "parameters"
