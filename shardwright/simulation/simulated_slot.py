"""A slot at work in simulated time: what slots of training steps and of models have alike.

A slot does one thing at a time. Whoever drives it calls `advance` when it is free: it does what the
runtime's worker would do then, and says for how many seconds that keeps it busy, or that there is
only waiting.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shardwright.comm.transport import Membership
from shardwright.engine.agenda import Entry
from shardwright.engine.slot_steps import Occurrence, Place, SlotStep, SlotSteps
from shardwright.engine.step_plan import StepPlan
from shardwright.engine.timeline import Event, EventKind
from shardwright.engine.walk import Cursor, SlotWalk
from shardwright.pipeline.schema import Document
from shardwright.simulation.simulated_memory import Ledger, SimulatedStorage, constant_items
from shardwright.simulation.simulated_network import Network, SimulatedMember, Wake
from shardwright.simulation.task_work import TaskWork

_EVENT_KINDS: dict[str, EventKind] = {"FX": "compute", "send": "send", "recv": "recv"}


@dataclass(frozen=True, slots=True)
class World:
    """What slots share.

    overhead
        Seconds that a worker takes for each thing that it does, beside the thing itself.
    finish
        Is told slot, call and time when a slot is done with a call.
    """

    document: Document
    memberships: Mapping[str, Membership]
    work: TaskWork
    network: Network
    wake: Wake
    finish: Callable[[str, int, float], None]
    overhead: float

    @property
    def lends(self) -> bool:
        """Whether messages stand in memory that slots share."""
        return self.work.device.kind == "cpu"


@dataclass(slots=True, eq=False)
class SimulatedTransfer:
    """A communication that was started; ``storage`` is what it reads, ``outputs`` where it goes.

    ``at`` is its place in the walk through a training step.
    """

    call: int
    entry: Entry
    step: SlotStep
    part: SimulatedMember
    storage: SimulatedStorage | None
    outputs: tuple[Hashable, ...]
    at: tuple[Cursor, Occurrence] | None = None


class Awaited(NamedTuple):
    """What a slot waits for: of which call, where in its agenda, and the communication if any."""

    call: int
    entry: Entry
    posted: SimulatedTransfer | None = None


class SimulatedSlot(ABC):
    """One slot. ``busy_until`` is when it is free again."""

    def __init__(self, rank: int, steps: SlotSteps, world: World) -> None:
        self.name = steps.slot
        self.rank = rank
        self.steps = steps
        self.busy_until = 0.0
        self.events: list[Event] = []
        self.waits: list[tuple[Awaited | None, float]] = []
        self.computing = 0.0
        self.moving = 0.0
        self._world = world
        self._idle_since: float | None = None
        self._idle_for: Awaited | None = None
        constants = constant_items(steps)
        self.ledger = Ledger(steps.slot, constants)
        self.ledger.hold(
            "programs", SimulatedStorage(world.work.kept(steps.overwriting), "temporaries")
        )
        self.ledger.note(0)

    @abstractmethod
    def begin(self, call: int, inputs: Mapping[str, int]) -> None:
        """Take on a call; ``inputs`` are the bytes of the pipeline inputs that come with it."""

    @abstractmethod
    def awaited(self) -> Awaited | None:
        """What the oldest work waits for; None where there is no work."""

    @abstractmethod
    def _advance(self, now: float) -> float | None:
        """Do one thing; the seconds that it takes, None where there is only waiting."""

    def advance(self, now: float) -> float | None:
        """Do one thing, and note the waiting before it."""
        seconds = self._advance(now)
        if seconds is None:
            if self._idle_since is None:
                self._idle_since, self._idle_for = now, self.awaited()
            return None
        self.end_wait(now)
        self.busy_until = now + seconds
        return seconds

    def end_wait(self, now: float) -> None:
        """The slot has something to do again, or all is over."""
        if self._idle_since is not None and now > self._idle_since:
            self.waits.append((self._idle_for, now - self._idle_since))
            if self._idle_for is not None:
                self._note(self._idle_for.call, self._idle_for.entry, "wait", self._idle_since, now)
        self._idle_since = None

    # --- what both kinds do -----------------------------------------------------------------

    def _compute(
        self,
        call: int,
        entry: Entry,
        step: SlotStep,
        places: tuple[Sequence[Hashable], Sequence[Hashable]],
        now: float,
        *,
        first: bool = False,
    ) -> float:
        """Compute: ``places`` are those of the inputs and of the outputs."""
        reads, writes = places
        if step.does == "compute":
            seconds = self._run(step, reads, writes, first=first)
            self._note(call, entry, "compute", now, now + seconds)
        else:
            seconds = self._move(step, reads, writes)
        seconds += self._world.overhead
        self.computing += seconds
        return seconds

    def _run(
        self, step: SlotStep, reads: Sequence[Hashable], writes: Sequence[Hashable], *, first: bool
    ) -> float:
        """A supertask of the file."""
        work, ledger = self._world.work, self.ledger
        needed = work.footprint(step.task, self.steps.overwriting[step.task], first=first)
        if work.is_lowered(step.task):
            self._let_go(step, reads)
        ledger.note(needed.most)
        made: dict[int, SimulatedStorage] = {}
        for place, home in zip(writes, needed.homes, strict=True):
            if home.input is not None:
                ledger.hold(place, ledger.storage(reads[home.input]))
            else:
                new = made.setdefault(home.storage, SimulatedStorage(home.nbytes, "activations"))
                ledger.hold(place, new)
        if work.is_lowered(step.task):
            for k, place in enumerate(writes):
                ledger.hold(("output", step.task, k), ledger.storage(place))
        return work.seconds(step.task)

    def _let_go(self, step: SlotStep, reads: Sequence[Hashable]) -> None:
        """A lowered program has what it reads and makes until it runs again: that is now."""
        for k, place in enumerate(reads):
            self.ledger.hold(("input", step.task, k), self.ledger.storage(place))
        for k, _ in enumerate(step.outputs):
            self.ledger.drop(("output", step.task, k))

    def _move(self, step: SlotStep, reads: Sequence[Hashable], writes: Sequence[Hashable]) -> float:
        """Work that stands in no file."""
        found = [self.ledger.storage(place) for place in reads]
        if step.does == "copy":
            found = [a for a, b in zip(found[::2], found[1::2], strict=True) if a is not b]
        nbytes = sum(storage.nbytes for storage in found)
        for place in writes:
            self.ledger.hold(place, SimulatedStorage(nbytes, "activations"))
        self.ledger.note(0)
        return self._world.work.moving(step.does, nbytes)

    def _start(
        self,
        call: tuple[int, int],
        entry: Entry,
        step: SlotStep,
        places: tuple[Sequence[Hashable], tuple[Hashable, ...]],
        now: float,
    ) -> tuple[SimulatedTransfer, float]:
        """Start a communication; ``call`` is the call, and the number that members tell it by."""
        membership = self._world.memberships[step.task]
        part, busy = self._world.network.start(membership, call[1], now)
        reads, writes = places
        storage = self.ledger.storage(reads[0]) if reads else None
        if storage is not None and self._world.lends:
            part.block = self.ledger.lend(_nbytes(membership), membership.operation.size - 1)
            self.ledger.note(0)
        busy += self._world.overhead
        self.moving += busy
        found = SimulatedTransfer(call[0], entry, step, part, storage, writes)
        return found, busy

    def _take(self, posted: SimulatedTransfer, now: float) -> float:
        """Take what has come of a communication."""
        busy = posted.part.take(now)
        self.moving += busy
        if posted.part.over:
            self._receive(posted)
            self._note_communication(posted, now + busy)
        return busy

    def _receive(self, posted: SimulatedTransfer) -> None:
        """Its result is there, in the giver's block or in memory of this slot's own."""
        membership = self._world.memberships[posted.step.task]
        operation = membership.operation
        exchange = posted.part.exchange
        given = len(exchange.givers) == 1
        if posted.outputs:
            block = exchange.parts[exchange.givers[0]].block if given else None
            storage = posted.storage
            if storage is None or not given:
                nbytes = operation.gotten(membership.member).nbytes
                storage = self.ledger.see(block) if block else SimulatedStorage(nbytes, "messages")
            self.ledger.hold(posted.outputs[0], storage)
            self.ledger.note(0)
        if posted.part.block is not None and not given:
            posted.part.block.holders = 0

    def _note_communication(self, posted: SimulatedTransfer, end: float) -> None:
        membership = self._world.memberships[posted.step.task]
        operation, parts = membership.operation, posted.part.exchange.parts
        began = min(parts[member].began for member in posted.part.exchange.givers)
        gives_alone = operation.kind == "send" and membership.member == 0
        kind = _EVENT_KINDS.get("recv" if operation.kind == "send" else "", "collective")
        start, end = (posted.part.began, posted.part.left_at) if gives_alone else (began, end)
        self._note(
            posted.call,
            posted.entry,
            "send" if gives_alone else kind,
            start,
            end,
            _nbytes(membership),
        )

    def _note(
        self, call: int, entry: Entry, kind: EventKind, start: float, end: float, nbytes: int = 0
    ) -> None:
        self.events.append(
            Event(
                self.name,
                self.rank,
                call,
                entry.task,
                kind,
                start,
                end,
                nbytes,
                entry.stage,
                entry.microbatch,
            )
        )

    def _has_left(self, posted: SimulatedTransfer, now: float) -> bool:
        """Whether a communication is over, and all that it sends has left."""
        part = posted.part
        if part.over and part.left_at > now:
            self._world.wake(part.left_at, self.name)
        return part.over and part.left_at <= now


def _nbytes(membership: Membership) -> int:
    """What a member gives; what it gets where it gives nothing."""
    operation, member = membership.operation, membership.member
    spec = operation.inputs[member] or operation.outputs[member]
    return spec.nbytes if spec is not None else 0


# --- training steps -------------------------------------------------------------------------------
#
# The way through a step is the `SlotWalk` that the runtime's `StepWorker` takes, over the same
# plan: what has arrived is taken first, then communication is started, else the next thing is
# computed. The next step begins when the slot has done all of this one.


@dataclass(slots=True, eq=False)
class _SimulatedStepRun:
    """A step under way; ``places`` are where its tensors are."""

    call: int
    walk: SlotWalk
    places: set[Hashable] = field(default_factory=set)


class StepSlot(SimulatedSlot):
    """A slot at work on training steps; ``lookahead`` is the one that ``plan`` was made for."""

    def __init__(
        self, rank: int, steps: SlotSteps, world: World, plan: StepPlan, lookahead: int
    ) -> None:
        super().__init__(rank, steps, world)
        self._plan = plan
        self._lookahead = lookahead
        self._runs: deque[_SimulatedStepRun] = deque()
        self._posted: list[SimulatedTransfer] = []

    def begin(self, call: int, inputs: Mapping[str, int]) -> None:
        """Take on a step; what comes once a microbatch lies in one tensor."""
        walk = SlotWalk(self._plan.turns, self._plan.count, lookahead=self._lookahead)
        run, n = _SimulatedStepRun(call, walk), self._plan.microbatches
        for name, nbytes in inputs.items():
            spaces = range(n) if name in self._plan.inputs else range(n, n + 1)
            whole = SimulatedStorage(nbytes * len(spaces), "activations")
            for place in self._places(run, [(space, name) for space in spaces]):
                self.ledger.hold(place, whole)
                run.places.add(place)
        self.ledger.note(0)
        self._runs.append(run)

    def awaited(self) -> Awaited | None:
        """As the worker says it: what its oldest turn waits for."""
        run = self._current()
        cursor = run.walk.turns[0] if run is not None else None
        for posted in self._posted:
            assert posted.at is not None
            if not posted.part.over and (cursor is None or posted.at[0] is cursor):
                return Awaited(posted.call, posted.entry, posted)
        if run is not None and cursor is not None and cursor.next is not None:
            return Awaited(run.call, self._plan.entries[cursor.next.entry])
        return None

    def _advance(self, now: float) -> float | None:
        run = self._current()
        if run is not None:
            arrived = [posted for posted in self._posted if posted.part.is_ready(now)]
            if arrived:
                return sum(self._arrive(run, posted, now) for posted in arrived)
            found = run.walk.choose(lambda o: self._is_read(o.step.writes, now))
            if found is not None:
                act = self._post if found[1].step.communicates else self._do
                return act(run, *found, now)
        return self._retire(now)

    def _current(self) -> _SimulatedStepRun | None:
        """The oldest step with work left to do here."""
        return next((run for run in self._runs if run.walk.turns), None)

    def _arrive(self, run: _SimulatedStepRun, posted: SimulatedTransfer, now: float) -> float:
        busy = self._take(posted, now)
        if posted.part.over:
            assert posted.at is not None
            self._finish(run, posted.outputs, posted.at[1])
            run.walk.arrive(*posted.at)
            self._posted = [p for p in self._posted if not self._has_left(p, now + busy)]
        return busy

    def _post(
        self, run: _SimulatedStepRun, cursor: Cursor, occurrence: Occurrence, now: float
    ) -> float:
        entry, step = self._plan.entries[occurrence.entry], occurrence.step
        number = run.call * (self._plan.microbatches + 1) + occurrence.space
        reads, writes = self._reads(run, occurrence), self._writes(run, occurrence)
        posted, busy = self._start((run.call, number), entry, step, (reads, writes), now)
        posted.at = cursor, occurrence
        self._posted.append(posted)
        run.walk.begin(cursor)
        return busy

    def _do(
        self, run: _SimulatedStepRun, cursor: Cursor, occurrence: Occurrence, now: float
    ) -> float:
        entry, step = self._plan.entries[occurrence.entry], occurrence.step
        places = self._reads(run, occurrence), self._writes(run, occurrence)
        busy = self._compute(run.call, entry, step, places, now, first=occurrence.first)
        self._finish(run, places[1], occurrence)
        run.walk.compute(cursor, occurrence)
        return busy

    def _finish(
        self, run: _SimulatedStepRun, made: Sequence[Hashable], occurrence: Occurrence
    ) -> None:
        """There is what an occurrence makes, and no more what nothing reads after it."""
        run.places.update(made)
        for place in self._places(run, occurrence.drops):
            self.ledger.drop(place)
            run.places.discard(place)

    def _is_read(self, constants: Sequence[str], now: float) -> bool:
        """Whether communication under way still reads the memory of a constant."""
        if not constants or not self._posted:
            return False
        self._posted = [posted for posted in self._posted if not self._has_left(posted, now)]
        found = {id(self.ledger.storage(("constant", name))) for name in constants}
        return any(id(posted.storage) in found for posted in self._posted)

    def _retire(self, now: float) -> float | None:
        """Finish the oldest step if all its turns are done and all it sends has left."""
        if not self._runs or self._runs[0].walk.turns:
            return None
        self._posted = [posted for posted in self._posted if not self._has_left(posted, now)]
        run = self._runs[0]
        if any(posted.call == run.call for posted in self._posted):
            return None
        for place in run.places:
            self.ledger.drop(place)
        self._runs.popleft()
        self._world.finish(self.name, run.call, now)
        return 0.0

    # --- where tensors are ------------------------------------------------------------------

    def _places(self, run: _SimulatedStepRun, places: Sequence[Place]) -> tuple[Hashable, ...]:
        last = self._plan.microbatches + 1
        return tuple(
            ("constant", name) if space == last else (run.call, space, name)
            for space, name in places
        )

    def _reads(self, run: _SimulatedStepRun, occurrence: Occurrence) -> tuple[Hashable, ...]:
        return self._places(run, occurrence.reads)

    def _writes(self, run: _SimulatedStepRun, occurrence: Occurrence) -> tuple[Hashable, ...]:
        return self._places(run, [(occurrence.space, name) for name in occurrence.step.outputs])
