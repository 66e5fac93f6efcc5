"""Generated code that is looked at and changed after it was written.

Comes in: Python's text. Goes out: its syntax tree with the places of its parts, and the text with
some of them replaced. What always holds: what is not replaced stays as it is, comments too.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple


class Edit(NamedTuple):
    """What is put in place of the bytes from ``start`` to ``end``."""

    start: int
    end: int
    text: str


class Reference(NamedTuple):
    """A class that is named, and the call that makes one, if it is no mere name."""

    name: ast.Name
    call: ast.Call | None


class SourceText:
    """A text that is Python."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._bytes = text.encode()

    @cached_property
    def tree(self) -> ast.Module:
        """Its syntax tree."""
        return ast.parse(self.text)

    @cached_property
    def _lines(self) -> list[int]:
        lengths = (len(line) + 1 for line in self._bytes.split(b"\n"))
        return list(accumulate(lengths, initial=0))

    def span(self, node: ast.expr) -> tuple[int, int]:
        """Where an expression begins and ends, in bytes."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._lines[node.lineno - 1] + node.col_offset
        return start, self._lines[node.end_lineno - 1] + node.end_col_offset

    def replaced(self, edits: Iterable[Edit]) -> str:
        """The text after edits, of which no two overlap."""
        parts, at = [], 0
        for edit in sorted(edits, key=lambda edit: edit.start):
            parts += [self._bytes[at : edit.start], edit.text.encode()]
            at = edit.end
        return b"".join([*parts, self._bytes[at:]]).decode()

    def renamed(self, name: ast.Name, text: str) -> Edit:
        """Another name in the place of one."""
        return Edit(*self.span(name), text)

    def with_keyword(self, before: ast.keyword, text: str) -> Edit:
        """An argument in front of one."""
        start = self._lines[before.lineno - 1] + before.col_offset
        return Edit(start, start, f"{text}, ")

    def with_arguments(self, call: ast.Call, arguments: Sequence[str]) -> Edit:
        """More arguments behind those of a call."""
        end = self.span(call)[1] - 1
        lead = ", " if arguments and (call.args or call.keywords) else ""
        return Edit(end, end, f"{lead}{', '.join(arguments)}")

    def references(self, names: Collection[str]) -> Iterator[Reference]:
        """Where the text makes, or casts to, one of the classes of these names."""
        for node in ast.walk(self.tree):
            match node:
                case ast.Call(func=ast.Name(id=name) as found) if name in names:
                    yield Reference(found, node)
                case ast.Call(func=ast.Name(id="cast"), args=[ast.Name(id=name) as found, _]):
                    if name in names:
                        yield Reference(found, None)
