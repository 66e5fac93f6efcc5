"""A worker runs one slot, for several calls at once.

Calls come in by `begin`; each has a cursor that walks the slot's steps in file order. `advance`
moves one call by one step: computing and posted sends can always be done, a receive or collective
when its result is there. So a later call runs while an earlier one waits. Steps up to the last that
gives something to another slot go first, since somebody may be waiting for it; else the oldest call
does. Calls finish in the order they began.

What always holds: each step is done in the order of the calls; communication of a step is started
when the cursor reaches it; a call is finished when all that it sends has left. Where the slot has
state that a call replaces, or a transport that needs it, one call ends before the next starts.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from shardwright.comm.transport import Pending, Transport
from shardwright.runtime.board import Board, State
from shardwright.runtime.slot import Slot, Step
from shardwright.runtime.timeline import Event, EventKind


@dataclass(frozen=True, slots=True)
class Finished:
    """A call that this slot is done with: its pipeline outputs, and events where traced."""

    call: int
    outputs: dict[str, Tensor]
    events: list[Event]


@dataclass(slots=True)
class _Cursor:
    """A call's place in the steps, its tensors, and what of its communication is under way."""

    call: int
    tensors: dict[str, Tensor]
    position: int = 0
    pending: Pending | None = None
    leaving: list[tuple[Step, Pending]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)


class Worker:
    """One slot at work. Not for several threads."""

    def __init__(
        self, slot: Slot, transport: Transport, *, trace: bool = False, board: Board | None = None
    ) -> None:
        self.slot = slot
        self._transport = transport
        self._trace = trace
        self._board = board or Board.private()
        self._serial = transport.in_order or bool(slot.replaces)
        self._cursors: deque[_Cursor] = deque()
        self._finished: deque[Finished] = deque()
        self._at: Step | None = None
        self._end = len(slot.steps)
        gives = [i for i, step in enumerate(slot.steps) if step.membership and step.inputs]
        self._last_given = gives[-1] + 1 if gives else 0

    def begin(self, call: int, inputs: Mapping[str, Tensor]) -> None:
        """Take on a call, with the pipeline inputs of this slot."""
        tensors = {name: tensor.to(self.slot.device) for name, tensor in inputs.items()}
        self._cursors.append(_Cursor(call, tensors))

    def advance(self) -> bool:
        """Do one step of one call. False where there is nothing to do but wait.

        Whatever a step raises comes out as it is; `at` says which step it was.
        """
        return any(self._advance(cursor) for cursor in self._turns()) or self._retire()

    def finished(self) -> Finished | None:
        """The next call that is done with, if there is one."""
        return self._finished.popleft() if self._finished else None

    @property
    def busy(self) -> bool:
        """Whether a call is under way."""
        return bool(self._cursors)

    @property
    def at(self) -> Step | None:
        """The step that was tried last."""
        return self._at

    def awaited(self) -> tuple[int, int]:
        """The oldest call under way, and the index of the step that it waits for."""
        cursor = self._cursors[0]
        if cursor.position < self._end:
            return cursor.call, cursor.position
        return cursor.call, self.slot.steps.index(cursor.leaving[0][0])

    def pause(self) -> None:
        """Say that there is nothing to do."""
        if self._cursors:
            self._board.write(State.WAITING, *self.awaited())
        else:
            self._board.write(State.IDLE)

    def waited(self, start: float, end: float) -> None:
        """Note that there was nothing to do from ``start`` to ``end``."""
        if self._trace and self._cursors:
            call, step = self.awaited()
            task = self.slot.steps[step].task
            self._cursors[0].events.append(self._event(call, task, "wait", start, end))

    def reset(self) -> None:
        """Forget all calls."""
        self._cursors.clear()
        self._finished.clear()

    def _turns(self) -> list[_Cursor]:
        """The calls that may move, in the order to try them; none comes up to the one before it."""
        if self._serial:
            return [cursor for cursor in islice(self._cursors, 1) if cursor.position < self._end]
        limit, turns = self._end, []
        for cursor in self._cursors:
            if cursor.position < limit:
                turns.append(cursor)
            limit = min(limit, cursor.position)
        turns.sort(key=lambda cursor: cursor.position >= self._last_given)
        return turns

    def _advance(self, cursor: _Cursor) -> bool:
        step = self._at = self.slot.steps[cursor.position]
        done = self._compute(cursor, step) if step.program else self._communicate(cursor, step)
        if done:
            cursor.position += 1
            for name in step.dead:
                cursor.tensors.pop(name, None)
        return done

    def _compute(self, cursor: _Cursor, step: Step) -> bool:
        assert step.program is not None
        self._board.write(State.WORKING, cursor.call, cursor.position)
        start = time.monotonic()
        with torch.no_grad():
            outputs = step.program(self._gather(cursor, step))
        cursor.tensors.update(zip(step.outputs, outputs, strict=True))
        if self._trace:
            end = time.monotonic()
            cursor.events.append(self._event(cursor.call, step.task, "compute", start, end))
        return True

    def _communicate(self, cursor: _Cursor, step: Step) -> bool:
        assert step.membership is not None
        if cursor.pending is None:
            self._board.write(State.WORKING, cursor.call, cursor.position)
            given = self._gather(cursor, step)
            cursor.pending = self._transport.start(
                step.membership, cursor.call, given[0] if given else None
            )
        if not cursor.pending.ready():
            return False
        result = cursor.pending.result()
        if step.outputs:
            assert result is not None, "a supertask with an output gets a tensor"
            cursor.tensors[step.outputs[0]] = result
        cursor.leaving.append((step, cursor.pending))
        cursor.pending = None
        return True

    def _gather(self, cursor: _Cursor, step: Step) -> list[Tensor]:
        tensors, constants = cursor.tensors, self.slot.constants
        return [tensors[name] if name in tensors else constants[name] for name in step.inputs]

    def _retire(self) -> bool:
        """Finish the oldest call if all its steps are done and all it sends has left."""
        if not self._cursors or self._cursors[0].position < self._end:
            return False
        cursor = self._cursors[0]
        cursor.leaving = [left for left in cursor.leaving if not self._has_left(cursor, *left)]
        if cursor.leaving:
            return False
        for new, old in self.slot.replaces.items():
            # A copy: the caller of an in-process run may write to the tensors it gets.
            self.slot.constants[old] = cursor.tensors[new].clone()
        outputs = {name: cursor.tensors[name] for name in self.slot.outputs}
        self._finished.append(Finished(cursor.call, outputs, cursor.events))
        self._cursors.popleft()
        return True

    def _has_left(self, cursor: _Cursor, step: Step, pending: Pending) -> bool:
        self._at = step
        interval = pending.interval()
        if interval is None:
            return False
        if self._trace:
            event = self._event(cursor.call, step.task, step.kind, *interval, step.nbytes)
            cursor.events.append(event)
        return True

    def _event(
        self, call: int, task: str, kind: EventKind, start: float, end: float, nbytes: int = 0
    ) -> Event:
        return Event(self.slot.name, self.slot.rank, call, task, kind, start, end, nbytes)
