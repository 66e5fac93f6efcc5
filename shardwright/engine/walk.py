"""Instructions of a slot, what each has to wait for, and the order in which a slot works.

A worker goes through a turn in order, but does not wait for the communication that it starts, and
may begin a turn while earlier ones wait for others. What holds if it begins an instruction only
when those in its ``after`` are done: it reads what it would read if all were done one after
another, it overwrites nothing that is still to be read, no tensor is dropped before its last reader
is done, and a group's communication begins in the order of the microbatches.

In one call or step (`StepWalk`) a turn begins when it is at most ``lookahead`` actions behind the
oldest that is not done. Communication that can be started goes before computation, older turns
before later ones. Of several calls, what others may be waiting for goes first (`order_calls`).

Workers do the work and the simulator lets time pass; both take the same way for equal durations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile
from typing import Literal

Does = Literal["compute", "communicate", "relay", "zero", "copy", "stack"]
"""What a task does. The last four stand in no file."""


@dataclass(frozen=True, slots=True)
class SlotTask:
    """A supertask of a slot, or work that stands in no file.

    group
        A communication's; None where the task computes.
    starts
        Whether it has another program for the first microbatch, where accumulators are zeros.
    writes
        Constants that it overwrites.
    sharing
        Outputs that may lie in the memory of constants which change, and those constants.
    """

    name: str
    does: Does
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    group: str | None = None
    starts: bool = False
    writes: tuple[str, ...] = ()
    sharing: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @property
    def communicates(self) -> bool:
        """Whether others take part."""
        return self.group is not None


SpacedTensor = tuple[int, str]
"""A tensor: its space (a microbatch's, the step's, or that of the constants), and its name."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """A task once: for a microbatch, or for the whole step.

    index, entry
        Its number among all, and that of the entry that says where the worker is.
    reads, space
        Where its inputs are, and in which space its outputs go.
    first
        Whether accumulators count as zeros, whatever they hold.
    drops
        Tensors that nothing reads after it.
    after
        Instructions that must be done before it begins.
    """

    index: int
    entry: int
    task: SlotTask
    reads: tuple[SpacedTensor, ...]
    space: int
    first: bool = False
    drops: tuple[SpacedTensor, ...] = ()
    after: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Turn:
    """Instructions that begin in order; turns whose ``action`` is near may be under way together.

    ``action`` counts the schedule's actions, with ``prepare`` before the first and ``update`` after
    the last.
    """

    action: int
    instructions: tuple[Instruction, ...]


def instructions_of(turns: Sequence[Turn]) -> Iterator[Instruction]:
    """All instructions of turns, in order."""
    for turn in turns:
        yield from turn.instructions


# --- order --------------------------------------------------------------------------------------


Sharing = Mapping[str, frozenset[str]]
"""Tensor to the constants in whose memory it lies, where those change in a step."""


def order_in_file(
    turns: Sequence[Turn], *, constants: int, kept: Collection[SpacedTensor]
) -> list[Turn]:
    """The turns with ``after`` and ``drops``, each instruction behind the communication before it.

    ``constants`` and ``kept`` are as in `order_step`.
    """
    lives = _LiveRanges(turns, constants=constants, kept=kept)
    found = []
    for turn in turns:
        instructions: list[Instruction] = []
        for instruction in turn.instructions:
            before = instructions[-1:]
            after = tuple(one.index for one in before if one.task.communicates)
            instructions.append(replace(instruction, after=after, drops=lives.drops(instruction)))
        found.append(Turn(turn.action, tuple(instructions)))
    return found


def order_step(
    turns: Sequence[Turn],
    sharing: Sharing,
    *,
    lookahead: int,
    constants: int,
    kept: Collection[SpacedTensor],
) -> list[Turn]:
    """The turns with ``after`` and ``drops``.

    ``sharing`` says which tensors, constants among them, lie in memory that changes, and in which
    constants'. The tensors in ``kept`` are not dropped, nor are those in the space ``constants``.

    Turns that are more than ``lookahead`` actions apart are never under way together, and within a
    turn computation keeps its order anyhow, so nobody need wait for those.
    """
    needed = _needs(turns, sharing)
    lives = _LiveRanges(turns, constants=constants, kept=kept)
    found = []
    for k, turn in enumerate(turns):
        near = _near(turns[:k], turn, lookahead)
        instructions = []
        for instruction in turn.instructions:
            drops = lives.drops(instruction)
            last = set[int]().union(*(lives.readers.get(tensor, ()) for tensor in drops))
            after = near & (needed[instruction.index] | last)
            instructions.append(replace(instruction, after=tuple(sorted(after)), drops=drops))
            if instruction.task.communicates:
                near.add(instruction.index)
        found.append(Turn(turn.action, tuple(instructions)))
    return found


def _near(earlier: Sequence[Turn], turn: Turn, lookahead: int) -> set[int]:
    """The instructions of earlier turns that may be under way when ``turn`` is."""
    turns = takewhile(lambda other: turn.action - other.action <= lookahead, reversed(earlier))
    return {instruction.index for other in turns for instruction in other.instructions}


class _LiveRanges:
    """Who reads each tensor, and after which instruction it is dead.

    The tensors in ``kept`` are never dead, nor are those in the space ``constants``.
    """

    def __init__(
        self, turns: Sequence[Turn], *, constants: int, kept: Collection[SpacedTensor]
    ) -> None:
        self.readers: dict[SpacedTensor, set[int]] = {}
        last: dict[SpacedTensor, int] = {}
        for instruction in instructions_of(turns):
            for tensor in instruction.reads:
                self.readers.setdefault(tensor, set()).add(instruction.index)
                last[tensor] = instruction.index
            for name in instruction.task.outputs:
                last[instruction.space, name] = instruction.index
        self._drops: dict[int, list[SpacedTensor]] = {}
        for tensor, index in last.items():
            if tensor[0] != constants and tensor not in kept:
                self._drops.setdefault(index, []).append(tensor)

    def drops(self, instruction: Instruction) -> tuple[SpacedTensor, ...]:
        """The tensors that are dead after an instruction."""
        return tuple(self._drops.get(instruction.index, ()))


@dataclass(slots=True)
class _ResourceUse:
    """Who made a resource as it is now, if anybody did, and who has read it since."""

    makers: tuple[int, ...] = ()
    readers: list[int] = field(default_factory=list)


def _needs(turns: Sequence[Turn], sharing: Sharing) -> dict[int, set[int]]:
    """What each instruction waits for: makers of what it reads, readers of what it overwrites."""
    uses: dict[object, _ResourceUse] = {}
    needed: dict[int, set[int]] = {}
    for instruction in instructions_of(turns):
        mine = needed.setdefault(instruction.index, set())
        for resource in _read(instruction, sharing):
            use = uses.setdefault(resource, _ResourceUse())
            use.readers.append(instruction.index)
            mine.update(use.makers)
        for resource in _changed(instruction):
            use = uses.setdefault(resource, _ResourceUse())
            mine.update(use.readers, use.makers)
            uses[resource] = _ResourceUse((instruction.index,))
    return needed


def _read(instruction: Instruction, sharing: Sharing) -> Iterator[object]:
    """What an instruction must find as it was made: tensors, and memory that changes."""
    yield from instruction.reads
    for _, name in instruction.reads:
        yield from sharing.get(name, ())


def _changed(instruction: Instruction) -> Iterator[object]:
    """What is another after an instruction; communication of a group goes in order."""
    yield from ((instruction.space, name) for name in instruction.task.outputs)
    yield from instruction.task.writes
    if instruction.task.communicates:
        yield "group", instruction.task.group


# --- the order in which a slot works --------------------------------------------------------------


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
