"""The statements of a forward as lines, and those that delete what nothing reads any more.

Comes in: lines in order, each with the names that it reads and writes. Goes out: the same with
``del`` between them. What always holds: a name that is deleted is written before it is read again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

FREED_BEFORE = 20
"""Statements that must follow for names to be deleted."""


@dataclass(slots=True)
class Line:
    """A statement: its text, the comment above it, and the names that it reads and writes.

    ``large`` are those of them that stand for tensors worth deleting.
    """

    text: str
    comment: str = ""
    reads: frozenset[str] = frozenset()
    writes: tuple[str, ...] = ()
    large: frozenset[str] = frozenset()


def with_deletions(lines: Sequence[Line], kept: set[str]) -> Iterable[Line]:
    """The lines, with names deleted that nothing reads for long: their tensors may be large."""
    dead: list[str] = []
    for at, (line, idle) in enumerate(zip(lines, _idle_after(lines), strict=True)):
        yield line
        dead = [name for name in dead if name not in line.writes and name not in line.reads]
        dead += [name for name in idle if name not in kept and name not in dead]
        ahead = len(lines) - at - 1
        if dead and ahead >= FREED_BEFORE and lines[at + 1].comment:
            yield Line(f"del {', '.join(dead)}")
            dead = []


def _idle_after(lines: Sequence[Line]) -> list[list[str]]:
    """Of each line the large names that nothing reads, or that are written first and not soon."""
    found: list[list[str]] = []
    read: set[str] = set()
    """Names that are read next, and not written."""
    written: dict[str, int] = {}
    """Where names are written next."""
    for at in reversed(range(len(lines))):
        line = lines[at]
        soon = at + 1 + FREED_BEFORE
        found.append(
            [
                name
                for name in sorted(line.large)
                if name not in read and written.get(name, soon) >= soon
            ]
        )
        read.difference_update(line.writes)
        read |= line.reads
        written.update(dict.fromkeys(line.writes, at))
    return found[::-1]
