"""Which values the variables of a forward stand for, while its statements are written.

Comes in: the forward's work, and how often each value is read. Goes out: names. What always holds:
a name stands for one value at a time, and is free again when the last read of it is counted, but
for those that are pinned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from shardwright.codegenerate.writing.names import Variables
from shardwright.codegenerate.writing.step import Work


class Held:
    """The variables that hold values now; what is stored is reached without one."""

    def __init__(self, work: Work, reads: Mapping[int, int]) -> None:
        self._work = work
        self._left = Counter(reads)
        self._variables = Variables(work.taken)
        self._names: dict[int, str] = {}

    def __contains__(self, value_id: int) -> bool:
        return value_id in self._names

    def __getitem__(self, value_id: int) -> str:
        return self._names[value_id]

    def expression(self, value_id: int) -> str:
        """How a value is read."""
        if value_id in self._names:
            return self._names[value_id]
        return self._work.stored[value_id]

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
