"""A worker of a training pipeline: one step after another on the slot's state.

A step is laid out beforehand (`step_plan`). `advance` does what `SlotWalk` chooses: it starts what
communication it can, else computes the next occurrence of the oldest turn that can go on. So
communication is under way while the worker computes, and what follows runs while the oldest turn
waits for others, up to some actions ahead of it. The next step begins when the slot has done all of
this one.

What always holds: an occurrence begins when those that it must come after are done; memory that a
send still reads is not overwritten; a step is finished when all that it sends has left, and what
it returns shares no memory with the state. The call number of a communication is ``step * (n + 1)
+ microbatch``, where n microbatches are followed by the phases that run once a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from shardwright.comm.transport import PendingTransfer, Transport
from shardwright.comm.wire import conform
from shardwright.engine.board import Board, State
from shardwright.engine.slot import SlotProgram, storage_of
from shardwright.engine.slot_steps import Occurrence
from shardwright.engine.step_programs import StepPrograms
from shardwright.engine.walk import Cursor, SlotWalk
from shardwright.engine.worker import Worker


@dataclass(slots=True)
class _PostedTransfer:
    """A communication that was started; ``storage`` is the memory that it reads."""

    step: int
    cursor: Cursor
    occurrence: Occurrence
    pending: PendingTransfer
    storage: int | None
    over: bool = False


@dataclass(slots=True)
class StepRun:
    """A step under way: its tensors by space, and how far it has come."""

    step: int
    spaces: list[dict[str, Tensor]]
    walk: SlotWalk

    @property
    def turns(self) -> deque[Cursor]:
        """The turns that are left."""
        return self.walk.turns


class StepWorker(Worker):
    """One slot at work on training steps.

    ``lookahead`` is how many actions of the schedule a later one may be begun early; the
    plan must have been made for as many.
    """

    def __init__(
        self,
        slot: SlotProgram,
        programs: StepPrograms,
        transport: Transport,
        *,
        lookahead: int = 1,
        trace: bool = False,
        board: Board | None = None,
    ) -> None:
        super().__init__(slot, transport, programs.plan.entries, trace=trace, board=board)
        self._plan = programs.plan
        self._programs = programs
        self._lookahead = lookahead
        self._runs: deque[StepRun] = deque()
        self._posted: list[_PostedTransfer] = []

    def begin(self, call: int, inputs: Mapping[str, Tensor]) -> None:
        """Take on a step; what there is once a microbatch has that for a leading dimension."""
        n = self._plan.microbatches
        spaces: list[dict[str, Tensor]] = [{} for _ in range(n + 1)]
        for name, tensor in inputs.items():
            tensor = tensor.to(self.slot.device)
            if name in self._plan.inputs:
                for space, part in zip(spaces, tensor.unbind(), strict=False):
                    space[name] = conform(part, self._programs.inputs[name])
            else:
                spaces[n][name] = tensor
        walk = SlotWalk(
            self._plan.turns,
            self._plan.count,
            lookahead=self._lookahead,
            in_order=self._transport.in_order,
        )
        self._runs.append(StepRun(call, [*spaces, self.slot.constants], walk))

    def advance(self) -> bool:
        """Take what has arrived, or do one occurrence. False where there is only waiting."""
        run = self._current()
        return (run is not None and (self._take(run) or self._go_on(run))) or self._retire()

    @property
    def busy(self) -> bool:
        """Whether a step is under way."""
        return bool(self._runs)

    def awaited(self) -> tuple[int, int]:
        """The step that the worker is in, and the entry that its oldest turn waits for."""
        run = self._current()
        cursor = run.turns[0] if run is not None else None
        for posted in self._posted:
            if posted.cursor is cursor and not posted.over:
                return posted.step, posted.occurrence.entry
        if run is not None and cursor is not None and cursor.next is not None:
            return run.step, cursor.next.entry
        posted = self._posted[0]
        return posted.step, posted.occurrence.entry

    def reset(self) -> None:
        """Forget all steps."""
        self._runs.clear()
        self._posted.clear()
        self._forget()

    def _current(self) -> StepRun | None:
        """The oldest step with work left to do here."""
        return next((run for run in self._runs if run.turns), None)

    def _take(self, run: StepRun) -> bool:
        """Take what has arrived; says whether anything has. Lets go of what has left."""
        arrived = [posted for posted in self._posted if not posted.over and self._is_there(posted)]
        for posted in arrived:
            result, step = posted.pending.result(), posted.occurrence.step
            if step.outputs:
                assert result is not None, "a supertask with an output gets a tensor"
                run.spaces[posted.occurrence.space][step.outputs[0]] = result
            posted.over = True
            self._drop(run, posted.occurrence)
            run.walk.arrive(posted.cursor, posted.occurrence)
        if any(posted.over for posted in self._posted):
            self._let_leave()
        return bool(arrived)

    def _is_there(self, posted: _PostedTransfer) -> bool:
        self._at = self.entries[posted.occurrence.entry]
        return posted.pending.ready()

    def _go_on(self, run: StepRun) -> bool:
        """Start a communication, or else compute."""
        found = run.walk.choose(lambda occurrence: self._is_read(occurrence.step.writes))
        if found is None:
            return False
        act = self._start if found[1].step.communicates else self._run
        act(run, *found)
        return True

    def _start(self, run: StepRun, cursor: Cursor, occurrence: Occurrence) -> None:
        """Start a communication."""
        membership = self._programs.steps[occurrence.index].membership
        assert membership is not None
        self._at = self.entries[occurrence.entry]
        self._board.write(State.WORKING, run.step, occurrence.entry)
        given = _gather(run, occurrence)
        tensor = given[0] if given else None
        call = run.step * (self._plan.microbatches + 1) + occurrence.space
        pending = self._transport.start(membership, call, tensor)
        storage = storage_of(tensor) if tensor is not None else None
        self._posted.append(_PostedTransfer(run.step, cursor, occurrence, pending, storage))
        run.walk.begin(cursor)

    def _run(self, run: StepRun, cursor: Cursor, occurrence: Occurrence) -> None:
        """Compute."""
        step = self._programs.steps[occurrence.index]
        program = step.first if occurrence.first else step.program
        assert program is not None
        self._at = self.entries[occurrence.entry]
        inputs = _gather(run, occurrence)
        outputs = self._compute(run.step, occurrence.entry, step, program, inputs)
        run.spaces[occurrence.space].update(outputs)
        self._drop(run, occurrence)
        run.walk.compute(cursor, occurrence)

    def _drop(self, run: StepRun, occurrence: Occurrence) -> None:
        """Let go of what nothing reads any more."""
        for space, name in occurrence.drops:
            run.spaces[space].pop(name, None)

    def _is_read(self, constants: Sequence[str]) -> bool:
        """Whether communication under way still reads the memory of a constant."""
        if not constants or not self._posted:
            return False
        self._let_leave()
        storages = {self._storages[name] for name in constants}
        return any(posted.storage in storages for posted in self._posted)

    def _let_leave(self) -> None:
        """Forget communication that is over and whose bytes have all left."""
        self._posted = [posted for posted in self._posted if not self._is_over(posted)]

    def _is_over(self, posted: _PostedTransfer) -> bool:
        entry = posted.occurrence.entry
        step = self._programs.steps[posted.occurrence.index]
        return posted.over and self._has_left(posted.step, entry, step, posted.pending)

    def _retire(self) -> bool:
        """Finish the oldest step if all its turns are done and all it sends has left."""
        if not self._runs or self._runs[0].turns:
            return False
        self._let_leave()
        run = self._runs[0]
        if any(posted.step == run.step for posted in self._posted):
            return False
        outputs = {name: run.spaces[self._plan.microbatches][name] for name in self._plan.outputs}
        self._finish(run.step, {name: self._own(tensor) for name, tensor in outputs.items()})
        self._runs.popleft()
        return True


def _gather(run: StepRun, occurrence: Occurrence) -> list[Tensor]:
    return [run.spaces[space][name] for space, name in occurrence.reads]
