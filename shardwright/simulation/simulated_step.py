"""A slot that takes training steps in simulated time.

The way through a step is the `Walk` that the runtime's `StepWorker` takes, over the same plan: what
has arrived is taken first, then communication is started, else the next thing is computed. The next
step begins when the slot has done all of this one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from shardwright.engine.occurrences import Occurrence, Place
from shardwright.engine.slot_steps import SlotSteps
from shardwright.engine.step_plan import StepPlan
from shardwright.engine.walk import Cursor, Walk
from shardwright.simulation.simulated_memory import Storage
from shardwright.simulation.simulated_slot import Awaited, Posted, SimulatedSlot, World


@dataclass(slots=True, eq=False)
class _Run:
    """A step under way; ``places`` are where its tensors are."""

    call: int
    walk: Walk
    places: set[Hashable] = field(default_factory=set)


class StepSlot(SimulatedSlot):
    """A slot at work on training steps; ``lookahead`` is the one that ``plan`` was made for."""

    def __init__(
        self, rank: int, steps: SlotSteps, world: World, plan: StepPlan, lookahead: int
    ) -> None:
        super().__init__(rank, steps, world)
        self._plan = plan
        self._lookahead = lookahead
        self._runs: deque[_Run] = deque()
        self._posted: list[Posted] = []

    def begin(self, call: int, inputs: Mapping[str, int]) -> None:
        """Take on a step; what comes once a microbatch lies in one tensor."""
        walk = Walk(self._plan.turns, self._plan.count, lookahead=self._lookahead)
        run, n = _Run(call, walk), self._plan.microbatches
        for name, nbytes in inputs.items():
            spaces = range(n) if name in self._plan.inputs else range(n, n + 1)
            whole = Storage(nbytes * len(spaces), "activations")
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

    def _current(self) -> _Run | None:
        """The oldest step with work left to do here."""
        return next((run for run in self._runs if run.walk.turns), None)

    def _arrive(self, run: _Run, posted: Posted, now: float) -> float:
        busy = self._take(posted, now)
        if posted.part.over:
            assert posted.at is not None
            self._finish(run, posted.outputs, posted.at[1])
            run.walk.arrive(*posted.at)
            self._posted = [p for p in self._posted if not self._has_left(p, now + busy)]
        return busy

    def _post(self, run: _Run, cursor: Cursor, occurrence: Occurrence, now: float) -> float:
        entry, step = self._plan.entries[occurrence.entry], occurrence.step
        number = run.call * (self._plan.microbatches + 1) + occurrence.space
        reads, writes = self._reads(run, occurrence), self._writes(run, occurrence)
        posted, busy = self._start((run.call, number), entry, step, (reads, writes), now)
        posted.at = cursor, occurrence
        self._posted.append(posted)
        run.walk.begin(cursor)
        return busy

    def _do(self, run: _Run, cursor: Cursor, occurrence: Occurrence, now: float) -> float:
        entry, step = self._plan.entries[occurrence.entry], occurrence.step
        places = self._reads(run, occurrence), self._writes(run, occurrence)
        busy = self._compute(run.call, entry, step, places, now, first=occurrence.first)
        self._finish(run, places[1], occurrence)
        run.walk.compute(cursor, occurrence)
        return busy

    def _finish(self, run: _Run, made: Sequence[Hashable], occurrence: Occurrence) -> None:
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

    def _places(self, run: _Run, places: Sequence[Place]) -> tuple[Hashable, ...]:
        last = self._plan.microbatches + 1
        return tuple(
            ("constant", name) if space == last else (run.call, space, name)
            for space, name in places
        )

    def _reads(self, run: _Run, occurrence: Occurrence) -> tuple[Hashable, ...]:
        return self._places(run, occurrence.reads)

    def _writes(self, run: _Run, occurrence: Occurrence) -> tuple[Hashable, ...]:
        return self._places(run, [(occurrence.space, name) for name in occurrence.step.outputs])
