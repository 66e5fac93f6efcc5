"""A worker of a pipeline without training: several calls at once.

Each call has a cursor that walks the slot's steps in file order. `advance` moves one call by one
step, so a later call runs while an earlier one waits; `call_order` says which goes first.

What always holds: each step is done in the order of the calls; communication of a step is started
when the cursor reaches it; a call is finished when all that it sends has left. Where the slot has
state that a call replaces, or a transport that needs it, one call ends before the next starts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from shardwright.comm.transport import PendingTransfer, Transport
from shardwright.engine.agenda import Entry
from shardwright.engine.board import Board, State
from shardwright.engine.slot import Instruction, SlotProgram
from shardwright.engine.walk import call_order, last_given
from shardwright.engine.worker import Worker


@dataclass(slots=True)
class _CallCursor:
    """A call's place in the steps, its tensors, and what of its communication is under way."""

    call: int
    tensors: dict[str, Tensor]
    position: int = 0
    pending: PendingTransfer | None = None
    leaving: list[tuple[int, PendingTransfer]] = field(default_factory=list)


class CallWorker(Worker):
    """One slot at work on calls; ``shares`` says that somebody else changes its constants."""

    def __init__(
        self,
        slot: SlotProgram,
        transport: Transport,
        *,
        trace: bool = False,
        board: Board | None = None,
        shares: bool = False,
    ) -> None:
        entries = [Entry(step.task, step.tensor) for step in slot.steps]
        super().__init__(slot, transport, entries, trace=trace, board=board)
        self._shares = shares
        self._serial = transport.in_order or bool(slot.replaces)
        self._cursors: deque[_CallCursor] = deque()
        self._end = len(slot.steps)
        self._last_given = last_given(slot.plain.steps)

    def begin(self, call: int, inputs: Mapping[str, Tensor]) -> None:
        """Take on a call, with the pipeline inputs of this slot."""
        tensors = {name: tensor.to(self.slot.device) for name, tensor in inputs.items()}
        self._cursors.append(_CallCursor(call, tensors))

    def advance(self) -> bool:
        """Do one step of one call. False where there is nothing to do but wait."""
        return any(self._advance(cursor) for cursor in self._turns()) or self._retire()

    @property
    def busy(self) -> bool:
        """Whether a call is under way."""
        return bool(self._cursors)

    def awaited(self) -> tuple[int, int]:
        """The oldest call under way, and the index of the step that it waits for."""
        cursor = self._cursors[0]
        if cursor.position < self._end:
            return cursor.call, cursor.position
        return cursor.call, cursor.leaving[0][0]

    def reset(self) -> None:
        """Forget all calls."""
        self._cursors.clear()
        self._forget()

    def _turns(self) -> list[_CallCursor]:
        """The calls that may move, in the order to try them."""
        places = [cursor.position for cursor in self._cursors]
        order = call_order(places, self._end, self._last_given, serial=self._serial)
        return [self._cursors[k] for k in order]

    def _advance(self, cursor: _CallCursor) -> bool:
        step = self.slot.steps[cursor.position]
        self._at = self.entries[cursor.position]
        if step.program is not None:
            inputs = self._gather(cursor, step)
            index = cursor.position
            cursor.tensors.update(self._compute(cursor.call, index, step, step.program, inputs))
        elif not self._communicate(cursor, step):
            return False
        cursor.position += 1
        for name in step.dead:
            cursor.tensors.pop(name, None)
        return True

    def _communicate(self, cursor: _CallCursor, step: Instruction) -> bool:
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
        cursor.leaving.append((cursor.position, cursor.pending))
        cursor.pending = None
        return True

    def _gather(self, cursor: _CallCursor, step: Instruction) -> list[Tensor]:
        tensors, constants = cursor.tensors, self.slot.constants
        return [tensors[name] if name in tensors else constants[name] for name in step.inputs]

    def _retire(self) -> bool:
        """Finish the oldest call if all its steps are done and all it sends has left."""
        if not self._cursors or self._cursors[0].position < self._end:
            return False
        cursor = self._cursors[0]
        cursor.leaving = [
            (index, pending)
            for index, pending in cursor.leaving
            if not self._has_left(cursor.call, index, self.slot.steps[index], pending)
        ]
        if cursor.leaving:
            return False
        for new, old in self.slot.replaces.items():
            # A copy: the caller of an in-process run may write to the tensors it gets.
            self.slot.constants[old] = cursor.tensors[new].clone()
        outputs = {name: cursor.tensors[name] for name in self.slot.outputs}
        if self._shares:
            outputs = {name: self._own(tensor) for name, tensor in outputs.items()}
        self._finish(cursor.call, outputs)
        self._cursors.popleft()
        return True
