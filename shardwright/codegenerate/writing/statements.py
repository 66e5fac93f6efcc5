"""The statements of a forward that are written so far.

Comes in: lines, one after another, with where in the program they come from. Goes out: the lines
with comments and annotations. What always holds: a comment stands above a line that comes from
another place than the one before it; a variable that `annotate` was asked for says where it is
first written that it is a tensor.
"""

from __future__ import annotations

from collections.abc import Iterable

from shardwright.codegenerate.writing import origins
from shardwright.codegenerate.writing.lines import Line
from shardwright.ir.values import Source

INDENT = 8
"""Spaces before a statement of a method."""


class Statements:
    """Lines, and what is known of the types of the variables that they write."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.untyped: set[str] = set()
        """Variables that a type checker takes for Any."""
        self._first: dict[str, Line | None] = {}
        """The line that writes a variable first; None where it is known to be a tensor."""
        self._place: tuple[str, int] | None = None

    def add(self, line: Line, source: Source | None = None) -> None:
        """Write a line that does what the program does there."""
        place = origins.place(source) if source else None
        if source is not None and place != self._place:
            line.comment = origins.comment(source, INDENT)
        self._place = place
        self.lines.append(line)

    def is_new(self, name: str) -> bool:
        """Whether no line writes a variable yet."""
        return name not in self._first

    def declare(self, names: Iterable[str], line: Line | None = None) -> None:
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
            self.lines.insert(at, Line(f"{name}: Tensor", line.comment))
            line.comment = ""
        self._first[name] = None
        self.untyped.discard(name)
