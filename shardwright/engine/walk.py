"""How a slot walks through its training step: what it may begin, and what comes first.

In comes a step, laid out; the owner of a `SlotWalk` asks what to do (`choose`), does it, and tells
what began and what is done. The runtime does the work, the simulator lets time pass; so both take
the same way for the same durations.

What always holds: within a turn occurrences begin in order. A turn begins when it is at most
``lookahead`` actions behind the oldest that is not over, and an occurrence when those that it must
come ``after`` are done. Communication that can be started goes before computation, older turns
before later ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from shardwright.engine.slot_steps import Occurrence, PlannedTurn, SlotStep


@dataclass(slots=True, eq=False)
class Cursor:
    """A place in a turn, and how much of its communication is under way."""

    turn: PlannedTurn
    position: int = 0
    waiting: int = 0

    @property
    def next(self) -> Occurrence | None:
        """What comes next in the turn."""
        found = self.turn.occurrences
        return found[self.position] if self.position < len(found) else None

    @property
    def over(self) -> bool:
        """Whether the turn is done."""
        return self.next is None and not self.waiting


class SlotWalk:
    """One step under way on a slot; ``in_order`` is for transports that need it.

    ``turns`` are those that are left, the oldest first.
    """

    def __init__(
        self,
        turns: Sequence[PlannedTurn],
        count: int,
        *,
        lookahead: int,
        in_order: bool = False,
    ) -> None:
        self.turns = deque(map(Cursor, turns))
        self._done = bytearray(count)
        self._lookahead = lookahead
        self._in_order = in_order

    def choose(self, must_wait: Callable[[Occurrence], bool]) -> tuple[Cursor, Occurrence] | None:
        """What to begin now, None where there is nothing.

        ``must_wait`` says of an occurrence that computes whether it must not write yet.
        """
        ready = [
            (cursor, occurrence)
            for cursor in self._open()
            if (occurrence := cursor.next) is not None and self._may_begin(occurrence)
        ]
        for found in ready:
            if found[1].step.communicates:
                return found
        return next((found for found in ready if not must_wait(found[1])), None)

    def begin(self, cursor: Cursor) -> None:
        """The communication that comes next in a turn is under way."""
        cursor.position += 1
        cursor.waiting += 1

    def arrive(self, cursor: Cursor, occurrence: Occurrence) -> None:
        """A communication of a turn is done."""
        cursor.waiting -= 1
        self._finish(occurrence)

    def compute(self, cursor: Cursor, occurrence: Occurrence) -> None:
        """The computation that comes next in a turn is done."""
        cursor.position += 1
        self._finish(occurrence)

    def _finish(self, occurrence: Occurrence) -> None:
        self._done[occurrence.index] = 1
        while self.turns and self.turns[0].over:
            self.turns.popleft()

    def _open(self) -> Iterator[Cursor]:
        """The turns that may be under way, oldest first."""
        if self._in_order:
            yield from islice(self.turns, 1)
            return
        if not self.turns:
            return
        limit = self.turns[0].turn.action + self._lookahead
        for cursor in self.turns:
            if cursor.turn.action > limit:
                return
            if not cursor.over:
                yield cursor

    def _may_begin(self, occurrence: Occurrence) -> bool:
        """Whether it needs nothing that is still to be done."""
        return all(self._done[index] for index in occurrence.after)


# --- several calls --------------------------------------------------------------------------------
#
# Each call has a place in the slot's steps. Steps up to the last that gives something to another
# slot go first, since somebody may be waiting for it; else the oldest call does. No call comes up
# to the one before it.


def call_order(places: Sequence[int], steps: int, last_given: int, *, serial: bool) -> list[int]:
    """The calls that may move, in the order to try them: indices of ``places``, oldest first.

    ``last_given`` is what `last_given` says of the slot's ``steps``; with ``serial`` one call ends
    before the next starts.
    """
    if serial:
        return [k for k in range(len(places))[:1] if places[k] < steps]
    limit, found = steps, []
    for k, place in enumerate(places):
        if place < limit:
            found.append(k)
        limit = min(limit, place)
    found.sort(key=lambda k: places[k] >= last_given)
    return found


def last_given(steps: Sequence[SlotStep]) -> int:
    """Up to which place, itself left out, a slot still gives something to another."""
    gives = [i for i, step in enumerate(steps) if step.communicates and step.inputs]
    return gives[-1] + 1 if gives else 0
