"""The statements of one forward.

Comes in: its steps in order, what it is given and gives, and how stored values are reached. Goes
out: lines, each with the program's line as a comment where it is known. What always holds: the
lines do the steps' work in an order in which data is made before it is read and steps that stay
keep their places; a name stands for one thing at a time, and is used again once that is not needed.

An expression that is read once, in the same statement of the program, is nested there if that fits
the width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from shardwright.codegenerate.writing import origins
from shardwright.codegenerate.writing.held import Held
from shardwright.codegenerate.writing.lines import Line, with_deletions
from shardwright.codegenerate.writing.statements import INDENT, Statements
from shardwright.codegenerate.writing.step import Loop, Step, Work
from shardwright.ir.values import Source


class Body(NamedTuple):
    """A forward: the names of its arguments and of what it gives, and its statements."""

    arguments: tuple[str, ...]
    results: tuple[str, ...]
    lines: list[Line]


class _Written(NamedTuple):
    """An expression with the values whose names stand in it, once for each time it counts."""

    expression: str
    holds: tuple[int, ...]
    typed: bool


def write_body(work: Work) -> Body:
    """The statements of a forward."""
    return _Scribe(work).write()


class _Scribe:
    """Writes one body from the first step to the last."""

    def __init__(self, work: Work) -> None:
        self.work = work
        ends = [*work.results, *(value_id for _, value_id in work.updates)]
        self.uses = Counter(ends)
        self.reader: dict[int, int] = dict.fromkeys(ends, len(work.steps))
        self.maker = {v: step for step in work.steps if isinstance(step, Step) for v in step.made}
        for at, step in enumerate(work.steps):
            self.uses.update(step.reads)
            for value_id in step.reads:
                self.reader.setdefault(value_id, at)
        self.held = Held(work, self.uses)
        self.nested: dict[int, _Written] = {}
        self.statements = Statements()

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
        results = self._give()
        kept = {*arguments} if self.work.pinned else set()
        lines = list(with_deletions(self.statements.lines, kept))
        return Body(arguments, results, lines)

    # --- steps ------------------------------------------------------------------------------

    def _step(self, at: int, step: Step) -> None:
        written = self._compose(step)
        while not self._fits(step, written):
            inner = [value_id for value_id in step.reads if value_id in self.nested]
            self._unnest(max(inner, key=lambda v: len(self.nested[v].expression)))
            written = self._compose(step)
        for value_id in step.reads:
            self.nested.pop(value_id, None)
        if self._nests(at, step, written):
            self.nested[step.made[0]] = written
        else:
            self._assign(step, written)

    def _compose(self, step: Step) -> _Written:
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
        return _Written(expression, tuple(holds), typed and step.typed(expression))

    def _fits(self, step: Step, written: _Written) -> bool:
        if not any(value_id in self.nested for value_id in step.reads):
            return True
        target = sum(len(self.work.names[value_id]) + 4 for value_id in step.made)
        target += 0 if written.typed else len(": Tensor")
        return INDENT + target + len(written.expression) <= origins.WIDTH

    def _nests(self, at: int, step: Step, written: _Written) -> bool:
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

    def _unnest(self, value_id: int) -> None:
        """Make a statement of what was to be nested."""
        self._assign(self.maker[value_id], self.nested.pop(value_id))

    def _assign(self, step: Step, written: _Written) -> None:
        reads = self.held.names(written.holds)
        large = self.held.names(self.work.large.intersection(written.holds))
        for value_id in written.holds:
            self.held.count(value_id)
        made = step.made
        if step.is_tuple and len(made) > 1:
            targets = ["_" if v is None else self.held.take(v) for v in step.makes]
            target = ", ".join(targets)
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
        line = Line(text, reads=reads, writes=writes, large=large)
        self.statements.add(line, step.source)
        self.statements.declare(new, None if annotated else line)
        if len(writes) > 1 and not written.typed:
            self.statements.doubt(writes)
        for value_id in made:
            self.held.release(value_id)

    def _loop(self, loop: Loop) -> None:
        others = [v for at, v in enumerate(loop.arguments) if at != loop.carried]
        names = [self.held.expression(value_id) for value_id in loop.arguments]
        first = loop.first
        reads = self.held.names(others)
        if self.held.is_read_last(first):
            name = self.held.pass_on(first, loop.last)
            self.statements.annotate(name)
        else:
            name = self._begin_loop(loop, names[loop.carried])
        for value_id in (first, *others):
            self.held.count(value_id)
        names[loop.carried] = name
        call = f"{name} = {loop.callee}({', '.join(names)})"
        text = f"for {loop.item} in {loop.over}:\n    {call}"
        self.statements.add(Line(text, reads=reads | {name}, writes=(name,)))
        self.held.release(loop.last)

    def _begin_loop(self, loop: Loop, first: str) -> str:
        """Give what a loop begins with a variable of its own; its name."""
        reads = self.held.names([loop.first])
        name = self.held.take(loop.last)
        new = self.statements.is_new(name)
        self.statements.annotate(name)
        self.statements.declare([name])
        text = f"{name}{': Tensor' if new else ''} = {first}"
        self.statements.add(Line(text, reads=reads, writes=(name,)))
        return name

    # --- the end ----------------------------------------------------------------------------

    def _update(self) -> None:
        """New contents of buffers."""
        if not self.work.updates:
            return
        text, reads = "with torch.no_grad():", frozenset[str]()
        if len(self.work.updates) > 1:
            self._keep(value_id for _, value_id in self.work.updates if value_id not in self.held)
        for buffer, value_id in self.work.updates:
            text += f"\n    {buffer}.copy_({self.held.expression(value_id)})"
            reads |= self.held.names([value_id])
        self.statements.add(Line(text, reads=reads))

    def _keep(self, value_ids: Iterable[int]) -> None:
        """Give names to buffers whose contents move to others: these may be changed first."""
        for value_id in value_ids:
            text = self.held.expression(value_id)
            name = self.held.take(value_id, "kept")
            self.statements.add(Line(f"{name} = {text}", writes=(name,)))

    def _give(self) -> tuple[str, ...]:
        """The return; gives the names of what is returned."""
        results = self.work.results
        if not results:
            self.statements.add(Line("return ()"))
            return ()
        if len(results) == 1 and results[0] in self.nested:
            (written,) = self.nested.values()
            step = self.work.steps[-1]
            source = step.source if isinstance(step, Step) else None
            line = Line(f"return {written.expression}", reads=self.held.names(written.holds))
            self.statements.add(line, source)
            return (self.work.names[results[0]],)
        names = tuple(self.held.expression(value_id) for value_id in results)
        self.statements.add(Line(f"return {', '.join(names)}", reads=self.held.names(results)))
        if len(names) == 1 and names[0] in self.statements.untyped:
            self.statements.annotate(names[0])
        return names


def _same_place(one: Source | None, other: Source | None) -> bool:
    if one is None or other is None:
        return one is other
    return origins.place(one) == origins.place(other)
