"""A slot in simulated time: the runtime's `SlotEngine` on a clock, tasks and a transport that
compute and move nothing; and what came of it.

Its values are storages of so many bytes (`SimulatedStorage`); programs and transfers let time pass
on the slot's `VirtualClock`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
from torch import Tensor

from shardwright.comm.transport import Interval, Membership, PendingTransfer, TensorSpec, Transport
from shardwright.costs.predict import SlotMemory
from shardwright.engine.program import SlotProgram
from shardwright.engine.slot import CompiledTask, LoadedSlot, Run, ValueOps
from shardwright.engine.slot_engine import ANOTHER_ROUND, Awaited, SlotEngine
from shardwright.engine.timeline import Event, Timeline
from shardwright.engine.walk import Does
from shardwright.simulation.memory import (
    HeldValues,
    Ledger,
    SimulatedStorage,
    TaskWork,
    hold_constants,
)
from shardwright.simulation.network import Network, SimulatedMember


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


# --- a slot on a virtual clock --------------------------------------------------------------------


class VirtualClock:
    """One slot's time: what it does moves it on, what it takes beside a task does so later."""

    def __init__(self) -> None:
        self.computing = 0.0
        self.moving = 0.0
        self._began = self._busy = self._beside = 0.0

    def __call__(self) -> float:
        """The time now."""
        return self._began + self._busy

    def begin(self, now: float) -> None:
        """The slot does the next thing."""
        self._began, self._busy, self._beside = now, 0.0, 0.0

    def compute(self, seconds: float, beside: float) -> None:
        """A task takes its time, and the worker ``beside`` it some, which is no part of it."""
        self._busy += seconds
        self._beside += beside
        self.computing += seconds + beside

    def move(self, seconds: float) -> None:
        """The slot moves bytes."""
        self._busy += seconds
        self.moving += seconds

    @property
    def busy(self) -> float:
        """Seconds that the thing takes that was begun last."""
        return self._busy + self._beside


class SimulatedTransfer(PendingTransfer):
    """A member's part in a communication that was started."""

    def __init__(
        self,
        transport: SimulatedTransport,
        membership: Membership,
        part: SimulatedMember,
        given: SimulatedStorage | None,
    ) -> None:
        self._transport = transport
        self._membership = membership
        self._part = part
        self._given = given
        self._found = self._end = 0.0

    def ready(self) -> bool:
        """Whether there is something to take."""
        self._found = self._transport.clock()
        return self._part.is_ready(self._found)

    def result(self) -> Tensor | None:
        """Take it; what is found at the same time is taken side by side."""
        busy = self._part.take(self._found)
        self._end = self._found + busy
        self._transport.clock.move(busy)
        result = self._receive() if self._part.over else ANOTHER_ROUND
        return cast("Tensor | None", result)

    def interval(self) -> Interval | None:
        """When bytes were on their way."""
        part, transport = self._part, self._transport
        if part.left_at > transport.clock():
            transport.network.wake(part.left_at, transport.ledger.slot)
            return None
        if self._membership.operation.kind == "send" and part.member == 0:
            return Interval(part.began, part.left_at)
        exchange = part.exchange
        return Interval(min(exchange.parts[m].began for m in exchange.operation.givers), self._end)

    def _receive(self) -> SimulatedStorage | None:
        """What comes lies in the giver's block, or in memory of the slot's own."""
        exchange, block = self._part.exchange, self._part.block
        alone = len(exchange.operation.givers) == 1
        storage, spec = self._given, self._membership.operation.outputs[self._membership.member]
        if spec is not None:
            if storage is None or not alone:
                lent = exchange.parts[exchange.operation.givers[0]].block if alone else None
                ledger = self._transport.ledger
                new = SimulatedStorage(spec.nbytes, "messages")
                storage = new if lent is None else ledger.see(lent)
            self._transport.ledger.note_made(storage)
        if block is not None and not alone:
            block.holders = 0
        return storage if spec is not None else None


class SimulatedTransport(Transport):
    """A slot's way to the network of its world."""

    def __init__(self, network: Network, ledger: Ledger, clock: VirtualClock) -> None:
        self.network = network
        self.ledger = ledger
        self.clock = clock

    def start(self, membership: Membership, call: int, tensor: Tensor | None) -> PendingTransfer:
        """Take part in a communication, with a storage for what is given."""
        given = cast("SimulatedStorage | None", tensor)
        part, busy = self.network.start(membership, call, self.clock())
        if given is not None and self.network.lends:
            operation = membership.operation
            nbytes = operation.given(membership.member).nbytes
            part.block = self.ledger.lend(nbytes, operation.size - 1)
            self.ledger.note(0)
        self.clock.move(busy + self.network.overhead)
        return SimulatedTransfer(self, membership, part, given)

    def close(self) -> None:
        """Nothing is open."""

    def abort(self) -> None:
        """Nothing is open."""


class StorageOps(ValueOps):
    """Values of a simulated slot: an input is where it is, its microbatches lie in it together."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(torch.device("cpu"))
        self._ledger = ledger

    def space(self) -> HeldValues:
        """Where storages of a microbatch, or of a step, are kept by name."""
        return HeldValues(self._ledger)

    def place(self, value: Any) -> Any:
        """Where it is."""
        return value

    def split(self, value: Any, spec: TensorSpec, parts: int) -> Sequence[Any]:
        """One storage for all."""
        return [value] * parts

    def storage(self, value: Any) -> object:
        """Which memory a value lies in."""
        return id(value)

    def own(self, value: Any) -> Any:
        """What is given out is no part of the slot."""
        return value

    def replace(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        """A constant keeps its memory."""


class SimulatedSlot:
    """One slot; it does one thing at a time, and is free again at ``busy_until``."""

    def __init__(
        self,
        rank: int,
        program: SlotProgram,
        memberships: Mapping[str, Membership],
        work: TaskWork,
        network: Network,
    ) -> None:
        self.name = program.slot
        self.busy_until = 0.0
        self.events: list[Event] = []
        self._program = program
        self._work = work
        self._network = network
        self._clock = VirtualClock()
        self._ledger = Ledger(program.slot)
        self._waits: list[Wait] = []
        self._idle: tuple[float, Awaited | None] | None = None
        self._lowered: dict[str, HeldValues] = {}
        constants = hold_constants(self._ledger, program)
        self._ledger.note(0)
        self._ledger.hold(SimulatedStorage(work.kept(program.memory), "temporaries"))
        self._ledger.note(0)
        moves: tuple[Does, ...] = ("zero", "copy", "stack")
        slot = LoadedSlot(
            name=program.slot,
            rank=rank,
            device=torch.device("cpu"),
            program=program,
            tasks={
                name: CompiledTask(self._task(name), self._task(name, first=True))
                for name in program.memory
            },
            moves={does: self._moving(does) for does in moves},
            memberships=memberships,
            constants=cast("dict[str, Tensor]", constants),
        )
        transport = SimulatedTransport(network, self._ledger, self._clock)
        ops = StorageOps(self._ledger)
        self.engine = SlotEngine(slot, transport, trace=True, ops=ops, clock=self._clock)

    def begin(self, call: int, inputs: Mapping[str, int]) -> None:
        """Take on a call; ``inputs`` are the bytes of the pipeline inputs that come with it."""
        n = self._program.microbatches
        storages = {
            name: SimulatedStorage(
                nbytes * (n if name in self._program.inputs else 1), "activations"
            )
            for name, nbytes in inputs.items()
        }
        self.engine.begin(call, cast("dict[str, Tensor]", storages))
        self._ledger.note(0)

    def advance(self, now: float) -> tuple[float | None, list[int]]:
        """Do one thing; the seconds that it takes, None where there is only waiting.

        Beside them are the calls that are done with.
        """
        self._clock.begin(now)
        if not self.engine.advance():
            self._idle = self._idle or (now, self.awaited())
            return None, []
        self.end_wait(now)
        self.busy_until = now + self._clock.busy
        done = []
        while (finished := self.engine.finished()) is not None:
            self.events += finished.events
            done.append(finished.call)
        return self._clock.busy, done

    def awaited(self) -> Awaited | None:
        """What the slot waits for; None where all its work is done."""
        awaited = self.engine.awaited() if self.engine.busy else None
        left = awaited is not None and awaited.transfer is not None and awaited.transfer.is_taken
        return None if left else awaited

    def end_wait(self, now: float) -> None:
        """The slot has something to do again, or all is over."""
        if self._idle is not None and now > self._idle[0]:
            since, awaited = self._idle
            self._waits.append(Wait(*self._reason(awaited), now - since))
            if awaited is not None:
                event = self.engine.event(awaited.call, awaited.entry, "wait", since, now)
                self.events.append(event)
        self._idle = None

    def summary(self) -> SlotSimulation:
        """What the slot did in all."""
        return SlotSimulation(
            self.name,
            self.engine.slot.rank,
            self._clock.computing,
            self._clock.moving,
            sum(wait.seconds for wait in self._waits),
            added_up(self._waits),
            self._ledger.memory(),
        )

    def _reason(self, awaited: Awaited | None) -> tuple[str, tuple[str, ...]]:
        """What kind of thing the slot waited for, and who else takes part in it."""
        if awaited is None:
            return "end", ()
        if awaited.transfer is None:
            return "order", ()
        membership = awaited.transfer.membership
        kind = membership.operation.kind
        if kind == "send" and membership.member == 1:
            kind = "recv"
        names = self._network.names(membership.operation)
        return kind, tuple(name for name in names if name != self.name)

    # --- programs ---------------------------------------------------------------------------

    def _task(self, task: str, *, first: bool = False) -> Run:
        """A supertask's program: seconds, and where its outputs lie.

        A lowered one has what it reads and makes until it runs again: that is now.
        """
        work, memory = self._work, self._program.memory[task]

        def run(inputs: Sequence[SimulatedStorage]) -> list[SimulatedStorage]:
            needed = work.footprint(task, memory, first=first)
            lowered = work.is_lowered(task)
            if lowered:
                kept = self._lowered.setdefault(task, HeldValues(self._ledger))
                for k, storage in enumerate(inputs):
                    kept["input", k] = storage
                for k, _ in enumerate(needed.homes):
                    kept.pop(("output", k))
            self._ledger.note(needed.most)
            made: dict[int, SimulatedStorage] = {}
            outputs = [
                inputs[home.input]
                if home.input is not None
                else made.setdefault(home.storage, SimulatedStorage(home.nbytes, "activations"))
                for home in needed.homes
            ]
            if lowered:
                for k, storage in enumerate(outputs):
                    kept["output", k] = storage
            self._clock.compute(work.seconds(task), self._network.overhead)
            return outputs

        return cast("Run", run)

    def _moving(self, does: Does) -> Run:
        """The program of work that stands in no file."""

        def run(inputs: Sequence[SimulatedStorage]) -> list[SimulatedStorage]:
            moved = list(inputs)
            if does == "copy":
                pairs = zip(inputs[::2], inputs[1::2], strict=True)
                moved = [new for new, old in pairs if new is not old]
            nbytes = sum(storage.nbytes for storage in moved)
            made = [SimulatedStorage(nbytes, "activations")] if does == "stack" else []
            if made:
                self._ledger.note_made(made[0])
            else:
                self._ledger.note(0)
            self._clock.compute(self._work.moving(does, nbytes), self._network.overhead)
            return made

        return cast("Run", run)
