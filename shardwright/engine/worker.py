"""A worker runs one slot. What the two kinds share: `CallWorker` and `StepWorker`.

Calls, or steps, come in by `begin`; `advance` does one piece of work: computing and posted sends
can always be done, a receive or collective when its result is there. Nothing blocks, so whoever
drives a worker sleeps when there is nothing to do. What is finished comes out in the order it
began.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.comm.transport import PendingTransfer, Transport
from shardwright.engine.agenda import Entry
from shardwright.engine.board import Board, State
from shardwright.engine.compiling import Run
from shardwright.engine.slot import Instruction, SlotProgram, storage_of
from shardwright.engine.timeline import Event, EventKind


@dataclass(frozen=True, slots=True)
class Finished:
    """A call that this slot is done with: its pipeline outputs, and events where traced."""

    call: int
    outputs: dict[str, Tensor]
    events: list[Event]


class Worker(ABC):
    """One slot at work. Not for several threads.

    ``entries`` are the slot's places in a call; a number of one of them says where a worker is.
    """

    def __init__(
        self,
        slot: SlotProgram,
        transport: Transport,
        entries: Sequence[Entry],
        *,
        trace: bool = False,
        board: Board | None = None,
    ) -> None:
        self.slot = slot
        self.entries = entries
        self._transport = transport
        self._trace = trace
        self._board = board or Board.private()
        self._finished: deque[Finished] = deque()
        self._events: dict[int, list[Event]] = {}
        self._at: Entry | None = None
        self._storages = {name: storage_of(tensor) for name, tensor in slot.constants.items()}

    @abstractmethod
    def begin(self, call: int, inputs: Mapping[str, Tensor]) -> None:
        """Take on a call, with the pipeline inputs of this slot."""

    @abstractmethod
    def advance(self) -> bool:
        """Do one piece of work. False where there is nothing to do but wait.

        Whatever a step raises comes out as it is; `at` says where it was.
        """

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether a call is under way."""

    @abstractmethod
    def awaited(self) -> tuple[int, int]:
        """The oldest call under way, and the number of the entry that it waits for."""

    @abstractmethod
    def reset(self) -> None:
        """Forget all calls."""

    def finished(self) -> Finished | None:
        """The next call that is done with, if there is one."""
        return self._finished.popleft() if self._finished else None

    @property
    def has_finished(self) -> bool:
        """Whether `finished` has something to give."""
        return bool(self._finished)

    def close(self) -> None:
        """Let go of the connections to other slots."""
        self._transport.close()

    def abort(self) -> None:
        """Cut the connections to other slots, so that whoever waits for this one fails."""
        self._transport.abort()

    @property
    def at(self) -> Entry | None:
        """Where the worker was last."""
        return self._at

    def wait(self, bell: int, timeout: float | None) -> bool:
        """With nothing to do, sleep until that may have changed or ``bell`` is readable.

        False where nothing came for ``timeout`` seconds.
        """
        if self.busy:
            self._board.write(State.WAITING, *self.awaited())
        else:
            self._board.write(State.IDLE)
        start = time.monotonic()
        woken = self._transport.wait(bell, timeout)
        if self._trace and self.busy:
            call, index = self.awaited()
            self._note(call, self.entries[index], "wait", start, time.monotonic())
        return woken

    # --- for the two kinds ------------------------------------------------------------------

    def _compute(
        self, call: int, index: int, step: Instruction, run: Run, inputs: list[Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """Run a program; ``index`` is that of its entry. Gives what it makes, by name."""
        self._board.write(State.WORKING, call, index)
        start = time.monotonic()
        with torch.no_grad():
            outputs = run(inputs)
        if self._trace and step.kind is not None:
            self._note(call, self.entries[index], step.kind, start, time.monotonic())
        return zip(step.outputs, outputs, strict=True)

    def _has_left(self, call: int, index: int, step: Instruction, pending: PendingTransfer) -> bool:
        """Whether all that a communication sends has left; its event is noted then."""
        self._at = self.entries[index]
        interval = pending.interval()
        if interval is None:
            return False
        if self._trace and step.kind is not None:
            self._note(call, self.entries[index], step.kind, *interval, step.nbytes)
        return True

    def _note(
        self, call: int, entry: Entry, kind: EventKind, start: float, end: float, nbytes: int = 0
    ) -> None:
        event = Event(
            self.slot.name,
            self.slot.rank,
            call,
            entry.task,
            kind,
            start,
            end,
            nbytes,
            entry.stage,
            entry.microbatch,
        )
        self._events.setdefault(call, []).append(event)

    def _finish(self, call: int, outputs: dict[str, Tensor]) -> None:
        self._finished.append(Finished(call, outputs, self._events.pop(call, [])))

    def _own(self, tensor: Tensor) -> Tensor:
        """An output in memory that is no constant's, which may change while it is on its way."""
        return tensor.clone() if storage_of(tensor) in self._storages.values() else tensor

    def _forget(self) -> None:
        self._finished.clear()
        self._events.clear()
