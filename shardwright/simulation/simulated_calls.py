"""A slot that takes a model's calls in simulated time, several of them at once.

Calls walk the slot's steps in file order, and `call_order` says which goes first, as it does in the
runtime's `CallWorker`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from shardwright.engine.agenda import Entry
from shardwright.engine.call_order import call_order, last_given
from shardwright.engine.slot_steps import SlotStep, SlotSteps
from shardwright.simulation.simulated_memory import Storage
from shardwright.simulation.simulated_slot import Awaited, Posted, SimulatedSlot, World


@dataclass(slots=True, eq=False)
class _Call:
    """A call under way: its place in the steps, and its communication."""

    call: int
    place: int = 0
    pending: Posted | None = None
    leaving: list[Posted] = field(default_factory=list)
    places: set[Hashable] = field(default_factory=set)


class CallSlot(SimulatedSlot):
    """A slot at work on calls."""

    def __init__(self, rank: int, steps: SlotSteps, world: World) -> None:
        super().__init__(rank, steps, world)
        self._calls: deque[_Call] = deque()
        self._serial = bool(steps.replaces)
        self._last_given = last_given(steps.steps)

    def begin(self, call: int, inputs: Mapping[str, int]) -> None:
        """Take on a call."""
        found = _Call(call)
        for name, nbytes in inputs.items():
            self.ledger.hold((call, name), Storage(nbytes, "activations"))
            found.places.add((call, name))
        self.ledger.note(0)
        self._calls.append(found)

    def awaited(self) -> Awaited | None:
        """What the oldest call waits for."""
        if not self._calls:
            return None
        call = self._calls[0]
        if call.place < len(self.steps.steps):
            return Awaited(call.call, self._entry(self.steps.steps[call.place]), call.pending)
        return Awaited(call.call, call.leaving[0].entry, call.leaving[0]) if call.leaving else None

    def _advance(self, now: float) -> float | None:
        places = [call.place for call in self._calls]
        steps = len(self.steps.steps)
        for k in call_order(places, steps, self._last_given, serial=self._serial):
            busy = self._move_on(self._calls[k], now)
            if busy is not None:
                return busy
        return self._retire(now)

    def _move_on(self, call: _Call, now: float) -> float | None:
        """Do a call's next step; None where it waits for others."""
        step = self.steps.steps[call.place]
        if step.communicates:
            return self._communicate(call, step, now)
        places = self._places(call, step.inputs), self._places(call, step.outputs)
        busy = self._compute(call.call, self._entry(step), step, places, now)
        self._step_over(call, step, places[1])
        return busy

    def _communicate(self, call: _Call, step: SlotStep, now: float) -> float | None:
        busy = 0.0
        if call.pending is None:
            places = self._places(call, step.inputs), self._places(call, step.outputs)
            entry, numbers = self._entry(step), (call.call, call.call)
            call.pending, busy = self._start(numbers, entry, step, places, now)
        if not call.pending.part.is_ready(now + busy):
            return busy or None
        busy += self._take(call.pending, now + busy)
        if call.pending.part.over:
            call.leaving.append(call.pending)
            self._step_over(call, step, call.pending.outputs)
            call.pending = None
        return busy

    def _step_over(self, call: _Call, step: SlotStep, made: Sequence[Hashable]) -> None:
        """A step is done: there is what it makes, and no more what nothing reads after it."""
        call.place += 1
        call.places.update(made)
        for place in self._places(call, step.dead):
            self.ledger.drop(place)
            call.places.discard(place)

    def _retire(self, now: float) -> float | None:
        """Finish the oldest call if all its steps are done and all it sends has left."""
        if not self._calls or self._calls[0].place < len(self.steps.steps):
            return None
        call = self._calls[0]
        call.leaving = [posted for posted in call.leaving if not self._has_left(posted, now)]
        if call.leaving:
            return None
        for place in call.places:
            self.ledger.drop(place)
        self._calls.popleft()
        self._world.finish(self.name, call.call, now)
        return 0.0

    def _entry(self, step: SlotStep) -> Entry:
        return Entry(step.task, next(iter((*step.inputs, *step.outputs)), None))

    def _places(self, call: _Call, names: Sequence[str]) -> tuple[Hashable, ...]:
        constants = self.steps.constants
        return tuple(
            ("constant", name) if name in constants else (call.call, name) for name in names
        )
