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
from dataclasses import dataclass, field
from typing import NamedTuple

from shardwright.codegenerate.expression import Expression
from shardwright.codegenerate.writing import origins
from shardwright.codegenerate.writing.lines import Line, with_deletions
from shardwright.codegenerate.writing.names import Variables
from shardwright.codegenerate.writing.step import Loop, Step, Work
from shardwright.ir.values import Source

INDENT = 8
"""Spaces before a statement of a method."""


class Body(NamedTuple):
    """A forward: the names of its arguments and of what it gives, and its statements."""

    arguments: tuple[str, ...]
    results: tuple[str, ...]
    lines: list[Line]


class _Written(NamedTuple):
    """An expression with the values whose names stand in it, once for each time it counts."""

    expression: Expression
    holds: tuple[int, ...]
    typed: bool


def write_body(work: Work) -> Body:
    """The statements of a forward."""
    return _Scribe(work).write()


@dataclass
class _Scribe:
    """Writes one body from the first step to the last."""

    work: Work
    lines: list[Line] = field(default_factory=list)
    held: dict[int, str] = field(default_factory=dict)
    nested: dict[int, _Written] = field(default_factory=dict)
    declared: dict[str, Line | None] = field(default_factory=dict)
    untyped: set[str] = field(default_factory=set)
    source: tuple[str, int] | None = None

    def __post_init__(self) -> None:
        steps = self.work.steps
        ends = [*self.work.results, *(value_id for _, value_id in self.work.updates)]
        self.variables = Variables(self.work.taken)
        self.left = Counter(ends)
        self.reader: dict[int, int] = dict.fromkeys(ends, len(steps))
        self.maker = {v: step for step in steps if isinstance(step, Step) for v in step.made}
        for at, step in enumerate(steps):
            self.left.update(step.reads)
            for value_id in step.reads:
                self.reader.setdefault(value_id, at)
        self.uses = Counter(self.left)

    def write(self) -> Body:
        for value_id in self.work.arguments:
            name = self._take(value_id)
            self.declared[name] = None
        arguments = tuple(self.held[value_id] for value_id in self.work.arguments)
        for value_id in self.work.arguments:
            self._release(value_id)
        for at, step in enumerate(self.work.steps):
            if isinstance(step, Loop):
                self._loop(step)
            else:
                self._step(at, step)
        self._update()
        results = self._give()
        lines = list(with_deletions(self.lines, {*arguments} if self.work.pinned else set()))
        return Body(arguments, results, lines)

    # --- steps ------------------------------------------------------------------------------

    def _step(self, at: int, step: Step) -> None:
        written = self._compose(step)
        while not self._fits(step, written):
            inner = [value_id for value_id in step.reads if value_id in self.nested]
            self._unnest(max(inner, key=lambda v: len(self.nested[v].expression.text)))
            written = self._compose(step)
        for value_id in step.reads:
            self.nested.pop(value_id, None)
        if self._nests(at, step, written):
            self.nested[step.made[0]] = written
        else:
            self._assign(step, written)

    def _compose(self, step: Step) -> _Written:
        operands: dict[int, Expression] = {}
        holds: list[int] = []
        typed = True
        for value_id in step.reads:
            if value_id in self.nested:
                inner = self.nested[value_id]
                operands[value_id] = inner.expression
                holds += inner.holds
                typed &= inner.typed
            else:
                operands[value_id] = self._name(value_id)
                typed &= operands[value_id].text not in self.untyped
                holds.append(value_id)
        expression = step.expression(operands)
        typed |= expression.text.startswith(("torch.", "F."))
        return _Written(expression, tuple(holds), typed and step.typed(expression))

    def _fits(self, step: Step, written: _Written) -> bool:
        if not any(value_id in self.nested for value_id in step.reads):
            return True
        target = sum(len(self.work.names[value_id]) + 4 for value_id in step.made)
        target += 0 if written.typed else len(": Tensor")
        return INDENT + target + len(written.expression.text) <= origins.WIDTH

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
        reads = self._names(written.holds)
        large = self._names(self.work.large.intersection(written.holds))
        for value_id in written.holds:
            self._count(value_id)
        made = step.made
        if step.is_tuple and len(made) > 1:
            targets = ["_" if v is None else self._take(v) for v in step.makes]
            target = ", ".join(targets)
        else:
            target = ", ".join(self._take(value_id) for value_id in made)
        writes = tuple(self.held[value_id] for value_id in made)
        new = [name for name in writes if name not in self.declared]
        annotated = len(writes) == 1 and not written.typed
        if annotated:
            self._annotate(writes[0])
        target += ": Tensor" if annotated and new else ""
        text = f"{target} = {written.expression}" if target else written.expression.text
        large |= self._names(self.work.large.intersection(made))
        line = Line(text, reads=reads, writes=writes, large=large)
        self._add(line, step.source)
        self.declared.update(dict.fromkeys(new, None if annotated else line))
        if len(writes) > 1 and not written.typed:
            self.untyped.update(name for name in writes if self.declared[name] is not None)
        for value_id in made:
            self._release(value_id)

    def _loop(self, loop: Loop) -> None:
        others = [v for at, v in enumerate(loop.arguments) if at != loop.carried]
        names = [self._name(value_id).text for value_id in loop.arguments]
        first = loop.first
        reads = self._names(others)
        own = first in self.held and self.left[first] == 1 and first not in self.work.pinned
        if own:
            name = names[loop.carried]
            del self.held[first]
            self._hold(loop.last, name)
            self._annotate(name)
        else:
            held = self._names([first])
            name = self._take(loop.last)
            new = name not in self.declared
            self._annotate(name)
            self.declared[name] = None
            text = f"{name}{': Tensor' if new else ''} = {names[loop.carried]}"
            self._add(Line(text, reads=held, writes=(name,)), None)
        self.left[first] -= 1
        if not own:
            self._release(first)
        for value_id in others:
            self._count(value_id)
        names[loop.carried] = name
        call = f"{name} = {loop.callee}({', '.join(names)})"
        text = f"for {loop.item} in {loop.over}:\n    {call}"
        self._add(Line(text, reads=reads | {name}, writes=(name,)), None)
        self._release(loop.last)

    # --- the end ----------------------------------------------------------------------------

    def _update(self) -> None:
        """New contents of buffers."""
        if not self.work.updates:
            return
        text, reads = "with torch.no_grad():", frozenset[str]()
        if len(self.work.updates) > 1:
            self._keep(value_id for _, value_id in self.work.updates if value_id not in self.held)
        for buffer, value_id in self.work.updates:
            text += f"\n    {buffer}.copy_({self._name(value_id)})"
            reads |= self._names([value_id])
        self._add(Line(text, reads=reads), None)

    def _keep(self, value_ids: Iterable[int]) -> None:
        """Give names to buffers whose contents move to others: these may be changed first."""
        for value_id in value_ids:
            text = self._name(value_id).text
            self.held[value_id] = self.variables.take("kept")
            name = self.held[value_id]
            self._add(Line(f"{name} = {text}", writes=(name,)), None)

    def _give(self) -> tuple[str, ...]:
        """The return; gives the names of what is returned."""
        results = self.work.results
        if not results:
            self._add(Line("return ()"), None)
            return ()
        if len(results) == 1 and results[0] in self.nested:
            (written,) = self.nested.values()
            step = self.work.steps[-1]
            source = step.source if isinstance(step, Step) else None
            self._add(
                Line(f"return {written.expression}", reads=self._names(written.holds)), source
            )
            return (self.work.names[results[0]],)
        names = tuple(self._name(value_id).text for value_id in results)
        self._add(Line(f"return {', '.join(names)}", reads=self._names(results)), None)
        if len(names) == 1 and names[0] in self.untyped:
            self._annotate(names[0])
        return names

    def _annotate(self, name: str) -> None:
        """Say where a variable is first written that it is a tensor: mypy would take it for Any."""
        line = self.declared.get(name)
        if line is None:
            return
        if line.text.startswith(f"{name} = "):
            line.text = f"{name}: Tensor{line.text.removeprefix(name)}"
        else:
            at = next(at for at, other in enumerate(self.lines) if other is line)
            self.lines.insert(at, Line(f"{name}: Tensor", line.comment))
            line.comment = ""
        self.declared[name] = None
        self.untyped.discard(name)

    # --- names ------------------------------------------------------------------------------

    def _add(self, line: Line, source: Source | None) -> None:
        here = origins.place(source) if source else None
        if source is not None and here != self.source:
            line.comment = origins.comment(source, INDENT)
        self.source = here
        self.lines.append(line)

    def _name(self, value_id: int) -> Expression:
        if value_id in self.held:
            return Expression(self.held[value_id])
        return self.work.stored[value_id]

    def _names(self, value_ids: Iterable[int]) -> frozenset[str]:
        return frozenset(self.held[value_id] for value_id in value_ids if value_id in self.held)

    def _take(self, value_id: int) -> str:
        name = self.variables.take(self.work.names[value_id])
        self.held[value_id] = name
        return name

    def _hold(self, value_id: int, name: str) -> None:
        self.held[value_id] = name

    def _count(self, value_id: int) -> None:
        self.left[value_id] -= 1
        self._release(value_id)

    def _release(self, value_id: int) -> None:
        """Give a name back that nothing reads any more."""
        if value_id in self.held and not self.left[value_id] and value_id not in self.work.pinned:
            self.variables.free(self.held[value_id])


def _same_place(one: Source | None, other: Source | None) -> bool:
    if one is None or other is None:
        return one is other
    return origins.place(one) == origins.place(other)
