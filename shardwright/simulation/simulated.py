"""What a simulated run took: of each slot its work, its waiting and its memory, and a timeline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from shardwright.costs.predict import SlotMemory
from shardwright.engine.timeline import Event, Timeline


class Wait(msgspec.Struct, frozen=True):
    """Seconds that a slot had nothing to do, and what it waited for.

    ``kind`` is that of the communication (``recv``, ``all_reduce``, …), ``peers`` the slots that
    took part; ``order`` without peers where work waited for other work of the slot, ``end`` where
    the slot had done all that there was for it.
    """

    kind: str
    peers: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        peers = f" with {' '.join(self.peers)}" if self.peers else ""
        return f"{self.kind}{peers} {1e3 * self.seconds:.2f} ms"


class SlotSimulation(msgspec.Struct, frozen=True):
    """What one slot did in all: seconds of computing, of moving bytes itself, and of waiting.

    The three are the whole time. ``waits`` say for what, most first; ``memory`` is what the slot
    held when that was most.
    """

    slot: str
    rank: int
    computing: float
    moving: float
    waiting: float
    waits: tuple[Wait, ...]
    memory: SlotMemory


class StepSimulation(msgspec.Struct, frozen=True):
    """A training step, or a model's call, in simulated time; or several one after another.

    seconds
        From the beginning to the end of all.
    calls
        How many steps or calls there were.
    events
        Who did what when, as a real run would note it.
    """

    seconds: float
    calls: int
    slots: tuple[SlotSimulation, ...]
    events: tuple[Event, ...] = ()

    @property
    def step_time(self) -> float:
        """Seconds of each step or call, where they follow one another: all by their number."""
        return self.seconds / self.calls

    @property
    def idle(self) -> tuple[float, ...]:
        """The fraction of the time that each slot waited."""
        return tuple(slot.waiting / self.seconds if self.seconds else 0.0 for slot in self.slots)

    @property
    def peak_memory(self) -> dict[str, int]:
        """The most bytes that each slot held."""
        return {slot.slot: slot.memory.total for slot in self.slots}

    @property
    def timeline(self) -> Timeline:
        """The events, to be summed up and written."""
        return Timeline.of(self.events)

    def save_chrome_trace(self, path: str | Path) -> None:
        """Write a trace for ``chrome://tracing`` or Perfetto, as that of a real run."""
        self.timeline.save_chrome_trace(path)

    def __str__(self) -> str:
        each = f", {1e3 * self.seconds:.2f} ms for {self.calls}" if self.calls > 1 else ""
        lines = [f"{1e3 * self.step_time:.2f} ms{each}"]
        for slot, idle in zip(self.slots, self.idle, strict=True):
            lines.append(
                f"  {slot.slot}: computes {1e3 * slot.computing:.2f} ms, moves bytes "
                f"{1e3 * slot.moving:.2f} ms, waits {1e3 * slot.waiting:.2f} ms "
                f"({100 * idle:.1f}%)"
            )
            lines += [f"    waits for {wait}" for wait in slot.waits[:3]]
            lines.append(f"    memory {slot.memory}")
        return "\n".join(lines)


def added_up(waits: Sequence[Wait]) -> tuple[Wait, ...]:
    """Waits for the same, added, the longest first."""
    totals: dict[tuple[str, tuple[str, ...]], float] = {}
    for wait in waits:
        key = (wait.kind, wait.peers)
        totals[key] = totals.get(key, 0.0) + wait.seconds
    found = [Wait(kind, peers, seconds) for (kind, peers), seconds in totals.items()]
    return tuple(sorted(found, key=lambda wait: -wait.seconds))
