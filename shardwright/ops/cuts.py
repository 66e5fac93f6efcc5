"""How a length is divided: one `Cut` a part, larger parts first.

A cut is a range of an identifier's values. Cuts nest: what a cut covers can be cut again, on
another axis of a mesh, and still is one range of the whole. Parts of a dimension ``(h t)`` that is
divided by ``h`` are multiples of ``t``: that is `even_ranges`' unit.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.errors import AnnotationError


@dataclass(frozen=True, slots=True)
class Cut:
    """Part ``index`` of ``num``: the half-open range ``start`` to ``end`` of an identifier."""

    start: int
    end: int
    index: int = 0
    num: int = 1

    @property
    def length(self) -> int:
        """How many values the part has."""
        return self.end - self.start

    def cut(self, num: int) -> list[Cut]:
        """This part in ``num`` parts of its own. Raises AnnotationError as `even_cuts`."""
        return [
            Cut(
                self.start + part.start,
                self.start + part.end,
                self.index * num + part.index,
                self.num * num,
            )
            for part in even_cuts(self.length, num)
        ]


def even_cuts(length: int, num: int) -> list[Cut]:
    """``length`` in ``num`` parts. Raises AnnotationError where a part would be empty."""
    if isinstance(num, bool) or not isinstance(num, int) or num < 1:
        raise AnnotationError(f"num is {num!r}; expected the number of parts, 1 or more")
    if length < num:
        raise AnnotationError(f"a length of {length} does not give {num} parts of 1 or more")
    return [
        Cut(start, end, index, num) for index, (start, end) in enumerate(even_ranges(length, num))
    ]


def even_ranges(length: int, num: int, unit: int = 1) -> list[tuple[int, int]]:
    """``num`` ranges that join to 0..length, as even as multiples of ``unit`` can be.

    Larger ranges come first; where there are fewer units than parts the last ones are empty.
    """
    assert length % unit == 0
    small, larger = divmod(length // unit, num)
    ranges, start = [], 0
    for index in range(num):
        end = start + unit * (small + (index < larger))
        ranges.append((start, end))
        start = end
    return ranges
