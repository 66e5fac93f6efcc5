"""Boxes of a whole tensor: one half-open range a dimension, as ``placements`` in the format.

Invariant: ``start <= end``; a box with an empty range holds nothing, and the box of a
tensor without dimensions is ``()`` and holds one element.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Range = tuple[int, int]
"""From the first index to the one after the last."""
Ranges = tuple[Range, ...]
"""A box: one range a dimension."""
Shape = tuple[int, ...]


def whole(shape: Sequence[int]) -> Ranges:
    """The box of all of a tensor."""
    return tuple((0, size) for size in shape)


def part(span: Range, parts: int, index: int, unit: int = 1) -> Range:
    """Part ``index`` of a range cut in ``parts`` as even as can be, larger ones first.

    Each part is a multiple of ``unit``, as the range must be.

    >>> [part((0, 10), 4, i) for i in range(4)]
    [(0, 3), (3, 6), (6, 8), (8, 10)]
    >>> [part((0, 10), 4, i, unit=2) for i in range(4)]
    [(0, 4), (4, 6), (6, 8), (8, 10)]
    """
    start, end = span
    quotient, rest = divmod((end - start) // unit, parts)
    first = start + unit * (index * quotient + min(index, rest))
    return first, first + unit * (quotient + (index < rest))


def shape_of(box: Ranges) -> Shape:
    """The shape of what a box holds."""
    return tuple(end - start for start, end in box)


def volume(box: Ranges) -> int:
    """How many elements a box holds."""
    return math.prod(end - start for start, end in box)


def overlap(one: Range, other: Range) -> Range | None:
    """What two ranges share, None where that is nothing."""
    start, end = max(one[0], other[0]), min(one[1], other[1])
    return (start, end) if start < end else None


def within(box: Ranges, outer: Ranges) -> Ranges:
    """A box in the coordinates of ``outer``, a box that contains it."""
    return tuple(
        (start - origin, end - origin) for (start, end), (origin, _) in zip(box, outer, strict=True)
    )


def format_ranges(box: Ranges) -> str:
    """A box as Python slices: ``[0:5, 2:4]``."""
    return f"[{', '.join(f'{start}:{end}' for start, end in box)}]"
