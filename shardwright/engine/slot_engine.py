"""SlotEngine: one slot at work on calls of a pipeline, or on training steps.

Calls and steps come in by `SlotEngine.begin`; `SlotEngine.advance` does one piece of work:
computing and posted sends can always be done, a receive or collective is taken when its result is
there. Nothing blocks, so the caller that drives an engine sleeps when there is nothing to do. What
is finished comes out in the order it began. Not for several threads.

Training steps go one after another on the slot's state: the next begins when the slot has done all
of this one. Calls overlap, what others may wait for first; where a call replaces state, or the
transport needs it, one ends before the next starts.

An instruction begins when those that it must come after are done; memory that a send still reads is
not overwritten; a step is finished when all that it sends has left, and what it returns shares no
memory with the state. The number of a communication is ``step * (n + 1) + space``, where n
microbatches are followed by the space of the step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from shardwright.comm.transport import Membership, PendingTransfer, Transport
from shardwright.engine.board import Board, State
from shardwright.engine.program import Entry
from shardwright.engine.slot import LoadedSlot, ValueOps
from shardwright.engine.timeline import Event, EventKind
from shardwright.engine.walk import Cursor, Instruction, StepWalk, last_given, order_calls

ANOTHER_ROUND = object()
"""What a transfer's result is where it goes on: simulated collectives take their rounds in turn."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A call or step that this slot is done with: its outputs, and events where traced."""

    call: int
    outputs: dict[str, Tensor]
    events: list[Event]


class Awaited(NamedTuple):
    """What a slot waits for: of which call or step, at which entry, and the transfer, if any."""

    call: int
    entry: int
    transfer: PostedTransfer | None = None


@dataclass(slots=True, eq=False)
class StepRun:
    """A call or step under way: its values by space, and how far it has come."""

    step: int
    spaces: list[dict[str, Tensor]]
    walk: StepWalk

    @property
    def is_done(self) -> bool:
        """Whether all its work is; what it sends may still be under way."""
        return not self.walk.turns

    @property
    def position(self) -> int:
        """In a call, how many instructions are done."""
        cursor = next(iter(self.walk.turns), None)
        return len(self.walk.done) if cursor is None else cursor.position - cursor.waiting


@dataclass(slots=True, eq=False)
class PostedTransfer:
    """A communication that was started; ``storage`` is the memory that it reads."""

    run: StepRun
    cursor: Cursor
    instruction: Instruction
    membership: Membership
    pending: PendingTransfer
    storage: object
    is_taken: bool = False


class SlotEngine:
    """One slot at work.

    ``shares`` says that another program changes its constants. ``clock`` gives seconds, ``ops``
    says what values are; both are the simulator's where nothing is computed.
    """

    def __init__(
        self,
        slot: LoadedSlot,
        transport: Transport,
        *,
        trace: bool = False,
        board: Board | None = None,
        shares: bool = False,
        ops: ValueOps | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.slot = slot
        self.program = slot.program
        self._transport = transport
        self._trace = trace
        self._board = board or Board.private()
        self._ops = ops or ValueOps(slot.device)
        self._clock = clock
        self._owns = shares or self.program.is_step or bool(self.program.replaced)
        self._serial = transport.in_order or bool(self.program.replaced)
        self._last_given = last_given([*self.program.instructions])
        self._storages = {k: self._ops.storage(value) for k, value in slot.constants.items()}
        self._runs: deque[StepRun] = deque()
        self._posted: list[PostedTransfer] = []
        self._finished: deque[Finished] = deque()
        self._events: dict[int, list[Event]] = {}
        self._at: Entry | None = None

    # --- calls and steps --------------------------------------------------------------------

    def begin(self, call: int, inputs: Mapping[str, Tensor]) -> None:
        """Take on a call or step, with the pipeline inputs of this slot.

        What there is once a microbatch has that for a leading dimension.
        """
        n, split = self.program.microbatches, self.program.inputs
        spaces = [self._ops.space() for _ in range(n + 1)]
        for name, value in inputs.items():
            value = self._ops.place(value)
            if name in split:
                parts = self._ops.split(value, split[name], n)
                for space, part in zip(spaces, parts, strict=False):
                    space[name] = part
            else:
                spaces[n][name] = value
        walk = StepWalk(
            self.program.turns,
            lookahead=self.program.lookahead,
            in_order=self._transport.in_order,
        )
        self._runs.append(StepRun(call, [*spaces, self.slot.constants], walk))

    def advance(self) -> bool:
        """Do one piece of work. False where there is nothing to do but wait.

        Whatever a task raises comes out as it is; `at` says where it was.
        """
        for run in self._movable():
            if self._take(run) or self._go_on(run):
                return True
        return self._retire()

    @property
    def busy(self) -> bool:
        """Whether a call or step is under way."""
        return bool(self._runs)

    def finished(self) -> Finished | None:
        """The next call or step that is done with, if there is one."""
        return self._finished.popleft() if self._finished else None

    @property
    def has_finished(self) -> bool:
        """Whether `finished` has something to give."""
        return bool(self._finished)

    def reset(self) -> None:
        """Forget all calls and steps."""
        self._runs.clear()
        self._posted.clear()
        self._finished.clear()
        self._events.clear()

    def close(self) -> None:
        """Let go of the connections to other slots."""
        self._transport.close()

    def abort(self) -> None:
        """Cut the connections to other slots, so that those that wait for this one fail."""
        self._transport.abort()

    # --- where it is ------------------------------------------------------------------------

    @property
    def at(self) -> Entry | None:
        """Where the engine was last."""
        return self._at

    def awaited(self) -> Awaited:
        """What the oldest turn of the oldest call or step with work left waits for.

        Where all work is done, a transfer that has not left yet.
        """
        run = next((run for run in self._runs if not run.is_done), None)
        cursor = run.walk.turns[0] if run is not None else None
        for posted in self._posted:
            if posted.cursor is cursor and not posted.is_taken:
                return Awaited(posted.run.step, posted.instruction.entry, posted)
        if run is not None and cursor is not None and cursor.next is not None:
            return Awaited(run.step, cursor.next.entry)
        posted = self._posted[0]
        return Awaited(posted.run.step, posted.instruction.entry, posted)

    def wait(self, wakeup: int, timeout: float | None) -> bool:
        """With nothing to do, sleep until that may have changed or ``wakeup`` is readable.

        False where nothing came for ``timeout`` seconds.
        """
        if not self.busy:
            self._board.write(State.IDLE)
            return self._transport.wait(wakeup, timeout)
        awaited = self.awaited()
        self._board.write(State.WAITING, awaited.call, awaited.entry)
        start = self._clock()
        woken = self._transport.wait(wakeup, timeout)
        self._note(awaited.call, awaited.entry, "wait", start, self._clock())
        return woken

    # --- work -------------------------------------------------------------------------------

    def _movable(self) -> Iterable[StepRun]:
        """The calls or steps that may move, in the order to try them."""
        if self.program.is_step:
            return islice((run for run in self._runs if not run.is_done), 1)
        if self._serial or len(self._runs) < 2:
            return [*islice(self._runs, 1)]
        runs = [*self._runs]
        order = order_calls([run.position for run in runs], self._last_given)
        return [runs[k] for k in order]

    def _take(self, run: StepRun) -> bool:
        """Take what has arrived; says whether anything has. Lets go of what has left."""
        if not self._posted:
            return False
        arrived = [posted for posted in self._posted if self._is_there(posted, run)]
        for posted in arrived:
            result, task = posted.pending.result(), posted.instruction.task
            if result is ANOTHER_ROUND:
                continue
            if task.outputs:
                assert result is not None, "a task with an output gets a value"
                run.spaces[posted.instruction.space][task.outputs[0]] = result
            posted.is_taken = True
            self._drop(run, posted.instruction)
            run.walk.arrive(posted.cursor, posted.instruction)
        if any(posted.is_taken for posted in self._posted):
            self._let_leave()
        return bool(arrived)

    def _is_there(self, posted: PostedTransfer, run: StepRun) -> bool:
        if posted.run is not run or posted.is_taken:
            return False
        self._at = self.program.entries[posted.instruction.entry]
        return posted.pending.ready()

    def _go_on(self, run: StepRun) -> bool:
        """Start a communication, or else compute."""
        found = run.walk.choose(self._must_wait)
        if found is None:
            return False
        cursor, instruction = found
        self._at = self.program.entries[instruction.entry]
        self._board.write(State.WORKING, run.step, instruction.entry)
        inputs = [run.spaces[space][name] for space, name in instruction.reads]
        if instruction.task.communicates:
            self._start(run, cursor, instruction, inputs)
        else:
            self._compute(run, cursor, instruction, inputs)
        return True

    def _start(
        self, run: StepRun, cursor: Cursor, instruction: Instruction, inputs: Sequence[Tensor]
    ) -> None:
        """Start a communication; in a call, which waits for it, see at once if it is over."""
        membership = self.slot.memberships[instruction.task.name]
        number = run.step * (self.program.microbatches + 1) + instruction.space
        given = inputs[0] if inputs else None
        pending = self._transport.start(membership, number, given)
        storage = self._ops.storage(given) if given is not None else None
        posted = PostedTransfer(run, cursor, instruction, membership, pending, storage)
        self._posted.append(posted)
        run.walk.begin(cursor)
        if not self.program.is_step:
            self._take(run)

    def _compute(
        self, run: StepRun, cursor: Cursor, instruction: Instruction, inputs: list[Tensor]
    ) -> None:
        """Run a task's program."""
        task = instruction.task
        if task.does == "compute":
            compiled = self.slot.tasks[task.name]
            program = compiled.first if instruction.first else compiled.program
        else:
            program = self.slot.moves[task.does]
        assert program is not None
        start = self._clock()
        with torch.no_grad():
            outputs = program(inputs)
        if task.does == "compute":
            self._note(run.step, instruction.entry, "compute", start, self._clock())
        space = run.spaces[instruction.space]
        for name, output in zip(task.outputs, outputs, strict=True):
            space[name] = output
        self._drop(run, instruction)
        run.walk.compute(cursor, instruction)

    def _drop(self, run: StepRun, instruction: Instruction) -> None:
        """Let go of what nothing reads any more."""
        for space, name in instruction.drops:
            run.spaces[space].pop(name, None)

    def _must_wait(self, instruction: Instruction) -> bool:
        """Whether communication under way still reads the memory of a constant to be written."""
        constants = instruction.task.writes
        if not constants or not self._posted:
            return False
        self._let_leave()
        storages = {self._storages[name] for name in constants}
        return any(posted.storage in storages for posted in self._posted)

    def _let_leave(self) -> None:
        """Forget communication that is over and whose bytes have all left."""
        self._posted = [posted for posted in self._posted if not self._has_left(posted)]

    def _has_left(self, posted: PostedTransfer) -> bool:
        if not posted.is_taken:
            return False
        self._at = self.program.entries[posted.instruction.entry]
        interval = posted.pending.interval()
        if interval is None:
            return False
        if self._trace and posted.instruction.task.does == "communicate":
            kind, nbytes = _moved(posted.membership)
            self._note(posted.run.step, posted.instruction.entry, kind, *interval, nbytes)
        return True

    def _retire(self) -> bool:
        """Finish the oldest call or step if all its work is done and all it sends has left."""
        if not self._runs or not self._runs[0].is_done:
            return False
        run = self._runs[0]
        if self._posted:
            self._let_leave()
            if any(posted.run is run for posted in self._posted):
                return False
        outputs = {name: run.spaces[-2][name] for name in self.program.outputs}
        if self._owns:
            storages = self._storages.values()
            outputs = {
                name: self._ops.own(value) if self._ops.storage(value) in storages else value
                for name, value in outputs.items()
            }
        if replaced := self.program.replaced:
            constants, made = self.slot.constants, run.spaces[-2]
            self._ops.replace([(made[new], constants[old]) for new, old in replaced.items()])
        for space in run.spaces[:-1]:
            space.clear()
        self._finished.append(Finished(run.step, outputs, self._events.pop(run.step, [])))
        self._runs.popleft()
        return True

    def _note(
        self,
        call: int,
        index: int,
        kind: EventKind,
        start: float,
        end: float,
        nbytes: int = 0,
    ) -> None:
        if self._trace:
            event = self.event(call, index, kind, start, end, nbytes)
            self._events.setdefault(call, []).append(event)

    def event(
        self, call: int, index: int, kind: EventKind, start: float, end: float, nbytes: int = 0
    ) -> Event:
        """What happened at an entry of the program, as a timeline tells it."""
        entry, slot = self.program.entries[index], self.slot
        where = entry.stage, entry.microbatch
        return Event(slot.name, slot.rank, call, entry.task, kind, start, end, nbytes, *where)


def _moved(membership: Membership) -> tuple[EventKind, int]:
    """What a communication's events are called, and the bytes that a member gives.

    Those that it gets where it is a pair's receiver.
    """
    operation, member = membership.operation, membership.member
    if operation.kind == "send":
        return ("recv" if member else "send"), operation.gotten(1).nbytes
    spec = operation.inputs[member]
    return "collective", spec.nbytes if spec is not None else 0
