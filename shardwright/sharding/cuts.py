"""How the axes of a mesh cut the dimensions of a tensor.

Where several axes split one dimension, the outermost axis cuts the whole, the next cuts each of
its parts, and so on. Every cut is as even as multiples of its unit can be, larger parts first: 10
over 4 is 3, 3, 2, 2, and 10 over 2 × 2 is 5, 5 and then 3, 2, 3, 2.

What always holds, where every cut `fits`: the distinct slices tile the whole; along a dimension
their sizes differ by at most the largest unit, and the first slot's is the largest. The innermost
cut of a dimension can change while the outer ones stay.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from shardwright.clusters.mesh import coordinates
from shardwright.sharding.placement import Placements, Replicate, Shard
from shardwright.sharding.ranges import Range, Ranges, Shape, part

Lengths = tuple[int, ...]
"""The distinct lengths of ranges, ascending."""


class Cut(NamedTuple):
    """A dimension, or each of the parts that outer cuts left of it, cut along one axis."""

    axis: int
    shard: Shard
    parts: int
    lengths: Lengths
    """Of the ranges that are cut."""

    @property
    def fits(self) -> bool:
        """Whether the ranges are multiples of the unit."""
        return all(length % self.shard.unit == 0 for length in self.lengths)

    @property
    def is_even(self) -> bool:
        """Whether all parts of a range are equal, so that the unit makes no difference."""
        return all(length % (self.shard.unit * self.parts) == 0 for length in self.lengths)

    @property
    def left(self) -> Lengths:
        """The lengths of the parts."""
        unit, found = self.shard.unit, set()
        for length in self.lengths:
            small, larger = divmod(length // unit, self.parts)
            found.update({small * unit, (small + (larger > 0)) * unit})
        return tuple(sorted(found))


def cuts(placements: Placements, sizes: Sequence[int], shape: Shape) -> Iterator[Cut]:
    """Every cut that a layout makes, the outermost first; an axis of one slot makes none."""
    lengths: list[Lengths] = [(size,) for size in shape]
    for axis, (placement, parts) in enumerate(zip(placements, sizes, strict=True)):
        if isinstance(placement, Shard) and parts > 1:
            cut = Cut(axis, placement, parts, lengths[placement.dim])
            lengths[placement.dim] = cut.left
            yield cut


def largest_shape(placements: Placements, sizes: Sequence[int], shape: Shape) -> Shape:
    """The shape of the largest slice, which is the first slot's."""
    largest = list(shape)
    for cut in cuts(placements, sizes, shape):
        largest[cut.shard.dim] = cut.left[-1]
    return tuple(largest)


def leaves_none_empty(placements: Placements, sizes: Sequence[int], shape: Shape) -> bool:
    """Whether every slot holds something along every dimension that is not empty itself."""
    return all(cut.left[0] or not any(cut.lengths) for cut in cuts(placements, sizes, shape))


def normal_form(placements: Placements, sizes: Sequence[int], shape: Shape) -> Placements:
    """The placements that say the same in the fewest words, where every cut fits.

    Replicate along axes of one slot, and no unit where a cut is even.
    """
    found = [
        placement if size > 1 else Replicate()
        for placement, size in zip(placements, sizes, strict=True)
    ]
    for cut in cuts(placements, sizes, shape):
        if cut.is_even:
            found[cut.axis] = Shard(cut.shard.dim)
    return tuple(found)


@lru_cache(maxsize=4096)
def cut_slices(placements: Placements, sizes: tuple[int, ...], shape: Shape) -> tuple[Ranges, ...]:
    """The slice at each coordinate, row-major."""
    made = list(cuts(placements, sizes, shape))
    spans = [
        _spans(size, [cut for cut in made if cut.shard.dim == dim], sizes)
        for dim, size in enumerate(shape)
    ]
    return tuple(zip(*spans, strict=True)) if spans else ((),) * math.prod(sizes)


def _spans(size: int, made: Sequence[Cut], sizes: tuple[int, ...]) -> list[Range]:
    """The range of one dimension at each coordinate."""
    spans = []
    for coordinate in coordinates(sizes):
        span = (0, size)
        for cut in made:
            span = part(span, cut.parts, coordinate[cut.axis], cut.shard.unit)
        spans.append(span)
    return spans
