"""The statements of one forward, from its steps in order.

A step is an operator's call, a call of a module, or a loop over modules. An expression that is read
once, in the same statement of the program, is nested there if that fits the width. A variable
stands for one value at a time and is used again once that is not needed; a comment names the
program's line where it differs from the one before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardwright.codegenerate.writing.names import (
    WIDTH,
    source_comment,
    statement_start,
    unused,
)
from shardwright.ir.values import Source

INDENT = 8
"""Spaces before a statement of a method."""


@dataclass(frozen=True, slots=True)
class Step:
    """An expression; ``write`` gives its text from those of what it reads, by value id.

    reads
        Value ids, one an operand, in the order of the text.
    makes
        What the expression's value is: one value, or (``is_tuple``) a tuple with None where nobody
        needs a part.
    stays
        Whether it is a statement of its own, in its place: it draws random numbers.
    """

    reads: tuple[int, ...]
    makes: tuple[int | None, ...]
    write: Callable[[Mapping[int, str]], str]
    is_tuple: bool = False
    stays: bool = False
    source: Source | None = None

    @property
    def made(self) -> tuple[int, ...]:
        """The values that are needed."""
        return tuple(value_id for value_id in self.makes if value_id is not None)

    def expression(self, operands: Mapping[int, str]) -> str:
        """The text; of a tuple of which one part is needed, that part."""
        written = self.write(operands)
        if self.is_tuple and len(self.made) == 1:
            return f"{written}[{self.makes.index(self.made[0])}]"
        return written


@dataclass(frozen=True, slots=True)
class Loop:
    """Calls of modules in a chain: each reads what the one before it gives, and the same besides.

    ``over`` is iterated over, as ``self.h.values()``; ``item`` is the name of one of them.
    ``carried`` is the argument that the call before gives, ``last`` the value that leaves.
    """

    over: str
    item: str
    callee: str
    reads: tuple[int, ...]
    carried: int
    last: int

    @property
    def first(self) -> int:
        """The value that enters."""
        return self.reads[self.carried]


@dataclass(frozen=True, slots=True)
class ForwardSteps:
    """What a forward does, in an order in which it can run.

    updates
        Buffers, as they are reached, and the values that replace their contents in the end.
    stored
        How each stored value is reached that is no argument.
    names, reserved
        Wanted names by value id, and names that no value gets.
    pinned
        Values whose names stay theirs to the end.
    verbose
        Whether each step is a statement of its own.
    """

    steps: Sequence[Step | Loop]
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    updates: Sequence[tuple[str, int]]
    stored: Mapping[int, str]
    names: Mapping[int, str]
    pinned: frozenset[int] = frozenset()
    reserved: frozenset[str] = frozenset()
    verbose: bool = False


class Comment(str):
    """A line that says where the next one came from."""

    __slots__ = ()


class Body(NamedTuple):
    """A forward: the names of its arguments and of what it gives, and its lines."""

    arguments: tuple[str, ...]
    results: tuple[str, ...]
    lines: list[str]


class _Nested(NamedTuple):
    """An expression with the values whose names stand in it, once for each time it counts."""

    expression: str
    holds: tuple[int, ...]


def write_body(steps: ForwardSteps) -> Body:
    """The statements of a forward."""
    return _BodyWriter(steps).write()


class _BodyWriter:
    """Writes one body from the first step to the last."""

    def __init__(self, work: ForwardSteps) -> None:
        self.work = work
        ends = [*work.results, *(value_id for _, value_id in work.updates)]
        self.uses = Counter(ends)
        self.reader: dict[int, int] = dict.fromkeys(ends, len(work.steps))
        self.maker = {v: step for step in work.steps if isinstance(step, Step) for v in step.made}
        for at, step in enumerate(work.steps):
            self.uses.update(step.reads)
            for value_id in step.reads:
                self.reader.setdefault(value_id, at)
        self.held = _Variables(work, self.uses)
        self.nested: dict[int, _Nested] = {}
        self.lines: list[str] = []
        self.place: tuple[str, int] | None = None

    def write(self) -> Body:
        arguments = tuple(self.held.take(value_id) for value_id in self.work.arguments)
        for value_id in self.work.arguments:
            self.held.release(value_id)
        for at, step in enumerate(self.work.steps):
            if isinstance(step, Loop):
                self._loop(step)
            else:
                self._step(at, step)
        self._update()
        return Body(arguments, self._return(), self.lines)

    def _add(self, text: str, source: Source | None = None) -> None:
        """Write a statement that does what the program does there."""
        place = statement_start(source) if source else None
        if source is not None and place != self.place:
            self.lines.append(Comment(source_comment(source, INDENT)))
        self.place = place
        self.lines += text.split("\n")

    # --- steps ------------------------------------------------------------------------------

    def _step(self, at: int, step: Step) -> None:
        written = self._compose(step)
        while not self._fits(step, written):
            inner = [value_id for value_id in step.reads if value_id in self.nested]
            longest = max(inner, key=lambda v: len(self.nested[v].expression))
            self._assign(self.maker[longest], self.nested.pop(longest))
            written = self._compose(step)
        for value_id in step.reads:
            self.nested.pop(value_id, None)
        if self._nests(at, step):
            self.nested[step.made[0]] = written
        else:
            self._assign(step, written)

    def _compose(self, step: Step) -> _Nested:
        operands: dict[int, str] = {}
        holds: list[int] = []
        for value_id in step.reads:
            if value_id in self.nested:
                operands[value_id], inner = self.nested[value_id]
                holds += inner
            else:
                operands[value_id] = self.held.expression(value_id)
                holds.append(value_id)
        return _Nested(step.expression(operands), tuple(holds))

    def _fits(self, step: Step, written: _Nested) -> bool:
        if not any(value_id in self.nested for value_id in step.reads):
            return True
        target = sum(len(self.work.names[value_id]) + 4 for value_id in step.made)
        return INDENT + target + len(written.expression) <= WIDTH

    def _nests(self, at: int, step: Step) -> bool:
        """Whether the step becomes part of the statement that reads what it makes."""
        if self.work.verbose or step.stays or len(step.made) != 1 or self.uses[step.made[0]] != 1:
            return False
        steps, reader = self.work.steps, self.reader[step.made[0]]
        if reader == len(steps):
            ends = self.work.results == step.made and not self.work.updates  # they come before
            return ends and at == len(steps) - 1
        other = steps[reader]
        return isinstance(other, Step) and _same_place(step.source, other.source)

    def _assign(self, step: Step, written: _Nested) -> None:
        for value_id in written.holds:
            self.held.count(value_id)
        targets = step.makes if step.is_tuple and len(step.made) > 1 else step.made
        target = ", ".join("_" if v is None else self.held.take(v) for v in targets)
        self._add(f"{target} = {written.expression}" if target else written.expression, step.source)
        for value_id in step.made:
            self.held.release(value_id)

    def _loop(self, loop: Loop) -> None:
        others = [v for at, v in enumerate(loop.reads) if at != loop.carried]
        names = [self.held.expression(value_id) for value_id in loop.reads]
        if self.held.is_read_last(loop.first):
            name = self.held.pass_on(loop.first, loop.last)
        else:
            name = self.held.take(loop.last)
            self._add(f"{name} = {names[loop.carried]}")
        for value_id in (loop.first, *others):
            self.held.count(value_id)
        names[loop.carried] = name
        self._add(
            f"for {loop.item} in {loop.over}:\n    {name} = {loop.callee}({', '.join(names)})"
        )
        self.held.release(loop.last)

    # --- the end ----------------------------------------------------------------------------

    def _update(self) -> None:
        """New contents of buffers; those that move to others are kept first."""
        if not self.work.updates:
            return
        text = "with torch.no_grad():"
        if len(self.work.updates) > 1:
            for _, value_id in self.work.updates:
                if value_id not in self.held:
                    old = self.held.expression(value_id)
                    self._add(f"{self.held.take(value_id, 'kept')} = {old}")
        for buffer, value_id in self.work.updates:
            text += f"\n    {buffer}.copy_({self.held.expression(value_id)})"
        self._add(text)

    def _return(self) -> tuple[str, ...]:
        """The return; gives the names of what is returned."""
        results = self.work.results
        if len(results) == 1 and results[0] in self.nested:
            self._add(f"return {self.nested[results[0]].expression}", self.maker[results[0]].source)
            return (self.work.names[results[0]],)
        names = tuple(self.held.expression(value_id) for value_id in results)
        self._add(f"return {', '.join(names) or '()'}")
        return names


def _same_place(one: Source | None, other: Source | None) -> bool:
    if one is None or other is None:
        return one is other
    return statement_start(one) == statement_start(other)


class _Variables:
    """The variables that hold values now; what is stored is reached without one.

    A name is free again when the last read of its value is counted, but for pinned ones.
    """

    def __init__(self, work: ForwardSteps, reads: Mapping[int, int]) -> None:
        self._work = work
        self._left = Counter(reads)
        self._taken = set(work.reserved)
        self._names: dict[int, str] = {}

    def __contains__(self, value_id: int) -> bool:
        return value_id in self._names

    def expression(self, value_id: int) -> str:
        """How a value is read."""
        return self._names[value_id] if value_id in self._names else self._work.stored[value_id]

    def take(self, value_id: int, wanted: str | None = None) -> str:
        """A variable for a value, of the ``wanted`` name or of the one that it would have."""
        name = unused(wanted or self._work.names[value_id], self._taken)
        self._names[value_id] = name
        return name

    def is_read_last(self, value_id: int) -> bool:
        """Whether the next read of a variable is its last: it may then hold something else."""
        is_pinned = value_id in self._work.pinned
        return value_id in self and self._left[value_id] == 1 and not is_pinned

    def pass_on(self, value_id: int, other: int) -> str:
        """Let the variable of a value hold another one; gives its name."""
        self._names[other] = self._names.pop(value_id)
        return self._names[other]

    def count(self, value_id: int) -> None:
        """A value is read once."""
        self._left[value_id] -= 1
        self.release(value_id)

    def release(self, value_id: int) -> None:
        """Give a name back that nothing reads any more."""
        if value_id in self and not self._left[value_id] and value_id not in self._work.pinned:
            self._taken.discard(self._names[value_id])
