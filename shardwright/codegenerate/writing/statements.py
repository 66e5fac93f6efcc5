"""The statements of one forward, from its steps in order.

A step is an operator's call, a call of a module, or a loop over modules. An expression that is read
once, in the same statement of the program, is nested there if that fits the width. A variable
stands for one value at a time and is used again once that is not needed; a comment names the
program's line where it differs from the one before; what is large and no longer read is deleted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardwright.codegenerate.writing.names import (
    WIDTH,
    Variables,
    source_comment,
    statement_start,
)
from shardwright.ir.values import Source

INDENT = 8
"""Spaces before a statement of a method."""
FREED_BEFORE = 20
"""Statements that must follow for names to be deleted."""


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
    typed
        Whether a type checker knows that it gives tensors, if what it reads are.
    """

    reads: tuple[int, ...]
    makes: tuple[int | None, ...]
    write: Callable[[Mapping[int, str]], str]
    is_tuple: bool = False
    stays: bool = False
    typed: Callable[[str], bool] = lambda expression: True
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
    large
        Values that are worth deleting.
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
    large: frozenset[int] = frozenset()
    reserved: frozenset[str] = frozenset()
    verbose: bool = False


@dataclass(slots=True)
class StatementLine:
    """A statement: its text, the comment above it, and the names that it reads and writes.

    ``large`` are those of them that stand for tensors worth deleting.
    """

    text: str
    comment: str = ""
    reads: frozenset[str] = frozenset()
    writes: tuple[str, ...] = ()
    large: frozenset[str] = frozenset()


class Body(NamedTuple):
    """A forward: the names of its arguments and of what it gives, and its statements."""

    arguments: tuple[str, ...]
    results: tuple[str, ...]
    lines: list[StatementLine]


class _Nested(NamedTuple):
    """An expression with the values whose names stand in it, once for each time it counts."""

    expression: str
    holds: tuple[int, ...]
    typed: bool


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
        self.held = _HeldNames(work, self.uses)
        self.nested: dict[int, _Nested] = {}
        self.statements = _LineWriter()

    def write(self) -> Body:
        arguments = tuple(self.held.take(value_id) for value_id in self.work.arguments)
        self.statements.declare(arguments)
        for value_id in self.work.arguments:
            self.held.release(value_id)
        for at, step in enumerate(self.work.steps):
            if isinstance(step, Loop):
                self._loop(step)
            else:
                self._step(at, step)
        self._update()
        results = self._return()
        kept = {*arguments} if self.work.pinned else set()
        return Body(arguments, results, list(_with_deletions(self.statements.lines, kept)))

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
        if self._nests(at, step, written):
            self.nested[step.made[0]] = written
        else:
            self._assign(step, written)

    def _compose(self, step: Step) -> _Nested:
        operands: dict[int, str] = {}
        holds: list[int] = []
        typed = True
        for value_id in step.reads:
            if value_id in self.nested:
                inner = self.nested[value_id]
                operands[value_id] = inner.expression
                holds += inner.holds
                typed &= inner.typed
            else:
                operands[value_id] = self.held.expression(value_id)
                typed &= operands[value_id] not in self.statements.untyped
                holds.append(value_id)
        expression = step.expression(operands)
        typed |= expression.startswith(("torch.", "F."))
        return _Nested(expression, tuple(holds), typed and step.typed(expression))

    def _fits(self, step: Step, written: _Nested) -> bool:
        if not any(value_id in self.nested for value_id in step.reads):
            return True
        target = sum(len(self.work.names[value_id]) + 4 for value_id in step.made)
        target += 0 if written.typed else len(": Tensor")
        return INDENT + target + len(written.expression) <= WIDTH

    def _nests(self, at: int, step: Step, written: _Nested) -> bool:
        """Whether the step becomes part of the statement that reads what it makes."""
        if self.work.verbose or step.stays or len(step.made) != 1 or self.uses[step.made[0]] != 1:
            return False
        (value_id,) = step.made
        steps, reader = self.work.steps, self.reader[value_id]
        if reader == len(steps):
            ends = self.work.results == (value_id,) and not self.work.updates  # they come before
            return ends and at == len(steps) - 1 and written.typed
        other = steps[reader]
        return isinstance(other, Step) and _same_place(step.source, other.source)

    def _assign(self, step: Step, written: _Nested) -> None:
        reads = self.held.names(written.holds)
        large = self.held.names(self.work.large.intersection(written.holds))
        for value_id in written.holds:
            self.held.count(value_id)
        made = step.made
        if step.is_tuple and len(made) > 1:
            target = ", ".join("_" if v is None else self.held.take(v) for v in step.makes)
        else:
            target = ", ".join(self.held.take(value_id) for value_id in made)
        writes = tuple(self.held[value_id] for value_id in made)
        new = [name for name in writes if self.statements.is_new(name)]
        annotated = len(writes) == 1 and not written.typed
        if annotated:
            self.statements.annotate(writes[0])
        target += ": Tensor" if annotated and new else ""
        text = f"{target} = {written.expression}" if target else written.expression
        large |= self.held.names(self.work.large.intersection(made))
        line = StatementLine(text, reads=reads, writes=writes, large=large)
        self.statements.add(line, step.source)
        self.statements.declare(new, None if annotated else line)
        if len(writes) > 1 and not written.typed:
            self.statements.doubt(writes)
        for value_id in made:
            self.held.release(value_id)

    def _loop(self, loop: Loop) -> None:
        others = [v for at, v in enumerate(loop.reads) if at != loop.carried]
        names = [self.held.expression(value_id) for value_id in loop.reads]
        reads = self.held.names(others)
        if self.held.is_read_last(loop.first):
            name = self.held.pass_on(loop.first, loop.last)
            self.statements.annotate(name)
        else:
            name = self._begin_loop(loop, names[loop.carried])
        for value_id in (loop.first, *others):
            self.held.count(value_id)
        names[loop.carried] = name
        call = f"{name} = {loop.callee}({', '.join(names)})"
        text = f"for {loop.item} in {loop.over}:\n    {call}"
        self.statements.add(StatementLine(text, reads=reads | {name}, writes=(name,)))
        self.held.release(loop.last)

    def _begin_loop(self, loop: Loop, first: str) -> str:
        """Give what a loop begins with a variable of its own; its name."""
        reads = self.held.names([loop.first])
        name = self.held.take(loop.last)
        annotation = ": Tensor" if self.statements.is_new(name) else ""
        self.statements.annotate(name)
        self.statements.declare([name])
        self.statements.add(
            StatementLine(f"{name}{annotation} = {first}", reads=reads, writes=(name,))
        )
        return name

    # --- the end ----------------------------------------------------------------------------

    def _update(self) -> None:
        """New contents of buffers; those that move to others are kept first."""
        if not self.work.updates:
            return
        text, reads = "with torch.no_grad():", frozenset[str]()
        if len(self.work.updates) > 1:
            for _, value_id in self.work.updates:
                if value_id not in self.held:
                    old = self.held.expression(value_id)
                    name = self.held.take(value_id, "kept")
                    self.statements.add(StatementLine(f"{name} = {old}", writes=(name,)))
        for buffer, value_id in self.work.updates:
            text += f"\n    {buffer}.copy_({self.held.expression(value_id)})"
            reads |= self.held.names([value_id])
        self.statements.add(StatementLine(text, reads=reads))

    def _return(self) -> tuple[str, ...]:
        """The return; gives the names of what is returned."""
        results = self.work.results
        if not results:
            self.statements.add(StatementLine("return ()"))
            return ()
        if len(results) == 1 and results[0] in self.nested:
            (written,) = self.nested.values()
            step = self.work.steps[-1]
            source = step.source if isinstance(step, Step) else None
            line = StatementLine(
                f"return {written.expression}", reads=self.held.names(written.holds)
            )
            self.statements.add(line, source)
            return (self.work.names[results[0]],)
        names = tuple(self.held.expression(value_id) for value_id in results)
        self.statements.add(
            StatementLine(f"return {', '.join(names)}", reads=self.held.names(results))
        )
        if len(names) == 1 and names[0] in self.statements.untyped:
            self.statements.annotate(names[0])
        return names


def _same_place(one: Source | None, other: Source | None) -> bool:
    if one is None or other is None:
        return one is other
    return statement_start(one) == statement_start(other)


class _HeldNames:
    """The variables that hold values now; what is stored is reached without one.

    A name is free again when the last read of its value is counted, but for pinned ones.
    """

    def __init__(self, work: ForwardSteps, reads: Mapping[int, int]) -> None:
        self._work = work
        self._left = Counter(reads)
        self._variables = Variables(work.reserved)
        self._names: dict[int, str] = {}

    def __contains__(self, value_id: int) -> bool:
        return value_id in self._names

    def __getitem__(self, value_id: int) -> str:
        return self._names[value_id]

    def expression(self, value_id: int) -> str:
        """How a value is read."""
        return self._names[value_id] if value_id in self._names else self._work.stored[value_id]

    def names(self, value_ids: Iterable[int]) -> frozenset[str]:
        """The variables of those that have one."""
        return frozenset(self._names[value_id] for value_id in value_ids if value_id in self)

    def take(self, value_id: int, wanted: str | None = None) -> str:
        """A variable for a value, of the ``wanted`` name or of the one that it would have."""
        name = self._variables.take(wanted or self._work.names[value_id])
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
            self._variables.free(self._names[value_id])


class _LineWriter:
    """The lines so far, and what is known of the types of the variables that they write.

    ``untyped`` are variables that a type checker takes for Any.
    """

    def __init__(self) -> None:
        self.lines: list[StatementLine] = []
        self.untyped: set[str] = set()
        self._first: dict[str, StatementLine | None] = {}
        """The line that writes a variable first; None where it is known to be a tensor."""
        self._place: tuple[str, int] | None = None

    def add(self, line: StatementLine, source: Source | None = None) -> None:
        """Write a line that does what the program does there."""
        place = statement_start(source) if source else None
        if source is not None and place != self._place:
            line.comment = source_comment(source, INDENT)
        self._place = place
        self.lines.append(line)

    def is_new(self, name: str) -> bool:
        """Whether no line writes a variable yet."""
        return name not in self._first

    def declare(self, names: Iterable[str], line: StatementLine | None = None) -> None:
        """New variables are written first by a line, or known to be tensors."""
        self._first.update(dict.fromkeys(names, line))

    def doubt(self, names: Iterable[str]) -> None:
        """A type checker takes variables for Any that nothing says to be tensors."""
        self.untyped.update(name for name in names if self._first[name] is not None)

    def annotate(self, name: str) -> None:
        """Say where a variable is first written that it is a tensor: mypy would take it for Any."""
        line = self._first.get(name)
        if line is None:
            return
        if line.text.startswith(f"{name} = "):
            line.text = f"{name}: Tensor{line.text.removeprefix(name)}"
        else:
            at = next(at for at, other in enumerate(self.lines) if other is line)
            self.lines.insert(at, StatementLine(f"{name}: Tensor", line.comment))
            line.comment = ""
        self._first[name] = None
        self.untyped.discard(name)


# --- deletions ------------------------------------------------------------------------------------


def _with_deletions(lines: Sequence[StatementLine], kept: set[str]) -> Iterable[StatementLine]:
    """The lines, with names deleted that nothing reads for long: their tensors may be large."""
    dead: list[str] = []
    for at, (line, idle) in enumerate(zip(lines, _idle_after(lines), strict=True)):
        yield line
        dead = [name for name in dead if name not in line.writes and name not in line.reads]
        dead += [name for name in idle if name not in kept and name not in dead]
        ahead = len(lines) - at - 1
        if dead and ahead >= FREED_BEFORE and lines[at + 1].comment:
            yield StatementLine(f"del {', '.join(dead)}")
            dead = []


def _idle_after(lines: Sequence[StatementLine]) -> list[list[str]]:
    """Of each line the large names that nothing reads, or that are written first and not soon."""
    found: list[list[str]] = []
    read: set[str] = set()
    """Names that are read next, and not written."""
    written: dict[str, int] = {}
    """Where names are written next."""
    for at in reversed(range(len(lines))):
        line, soon = lines[at], at + 1 + FREED_BEFORE
        large = sorted(line.large - read)
        found.append([name for name in large if written.get(name, soon) >= soon])
        read.difference_update(line.writes)
        read |= line.reads
        written.update(dict.fromkeys(line.writes, at))
    return found[::-1]
