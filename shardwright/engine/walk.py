"""The order in which a slot works: what it may begin now, and what comes first.

In one call or step (`StepWalk`) instructions of a turn begin in order. A turn begins when it is at
most ``lookahead`` actions behind the oldest that is not done, and an instruction when those that it
must come ``after`` are done. Communication that can be started goes before computation, older turns
before later ones. Of several calls, what others may be waiting for goes first (`order_calls`).

Workers do the work and the simulator lets time pass; both take the same way for equal durations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

from shardwright.engine.instructions import Instruction, Turn


@dataclass(slots=True, eq=False)
class Cursor:
    """A position in a turn, and how much of its communication is under way."""

    turn: Turn
    position: int = 0
    waiting: int = 0

    @property
    def next(self) -> Instruction | None:
        """What comes next in the turn."""
        found = self.turn.instructions
        return found[self.position] if self.position < len(found) else None

    @property
    def is_done(self) -> bool:
        """Whether all of the turn is."""
        return self.next is None and not self.waiting


class StepWalk:
    """One call or step under way on a slot; ``in_order`` is for transports that need it.

    ``turns`` are those that are left, the oldest first.
    """

    def __init__(
        self, turns: Sequence[Turn], *, lookahead: int = 0, in_order: bool = False
    ) -> None:
        self.turns = deque(map(Cursor, turns))
        self.done = bytearray(sum(len(turn.instructions) for turn in turns))
        self._lookahead = lookahead
        self._in_order = in_order

    def choose(self, must_wait: Callable[[Instruction], bool]) -> tuple[Cursor, Instruction] | None:
        """What to begin now, None where there is nothing.

        ``must_wait`` says of an instruction that computes whether it must not write yet.
        """
        computing = []
        for cursor in self._open():
            instruction = cursor.next
            if instruction is None or not all(map(self.done.__getitem__, instruction.after)):
                continue
            if instruction.task.communicates:
                return cursor, instruction
            computing.append((cursor, instruction))
        for found in computing:
            if not must_wait(found[1]):
                return found
        return None

    def begin(self, cursor: Cursor) -> None:
        """The communication that comes next in a turn is under way."""
        cursor.position += 1
        cursor.waiting += 1

    def arrive(self, cursor: Cursor, instruction: Instruction) -> None:
        """A communication of a turn is done."""
        cursor.waiting -= 1
        self._finish(instruction)

    def compute(self, cursor: Cursor, instruction: Instruction) -> None:
        """The computation that comes next in a turn is done."""
        cursor.position += 1
        self._finish(instruction)

    def _finish(self, instruction: Instruction) -> None:
        self.done[instruction.index] = 1
        while self.turns and self.turns[0].is_done:
            self.turns.popleft()

    def _open(self) -> Sequence[Cursor]:
        """The turns that may be under way, oldest first."""
        if self._in_order or len(self.turns) < 2:
            return [*islice(self.turns, 1)]
        limit = self.turns[0].turn.action + self._lookahead
        return [*takewhile(lambda cursor: cursor.turn.action <= limit, self.turns)]


def order_calls(positions: Sequence[int], last_given: int) -> list[int]:
    """The calls that may move, in the order to try them: indices of ``positions``, oldest first.

    Up to ``last_given`` a call still gives something to another slot, which may be waiting for it:
    such calls go first, else the oldest does. No call comes up to the one before it.
    """
    limit, found = None, []
    for k, position in enumerate(positions):
        if limit is None or position < limit:
            found.append(k)
        limit = position if limit is None else min(limit, position)
    found.sort(key=lambda k: positions[k] >= last_given)
    return found


def last_given(instructions: Sequence[Instruction]) -> int:
    """Up to which instruction of a call, itself left out, a slot gives something to another."""
    gives = [k for k, i in enumerate(instructions) if i.task.communicates and i.task.inputs]
    return gives[-1] + 1 if gives else 0
