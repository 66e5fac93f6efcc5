"""Placements and layouts: how the slots of a mesh hold one tensor.

A placement says what the slots along one axis of a mesh hold, in the words of PyTorch's DTensor: it
prints as ``Replicate``, ``Shard(0)``, ``Shard(2 by 64)``, ``Partial(sum)``. A layout is one
placement a mesh axis. Along an axis with `Replicate` all slots hold the same; with `Shard(dim)`
each holds its part of that dimension (`cuts` says which); with `Partial(op)` each holds a term, and
the tensor is the reduction of all terms.

Invariant: placements and layouts print as text that parses back to them. Along an axis of one slot
all placements mean the same, and so do all units where a cut is even: `Layout.normal` is the one
way to say it that equal layouts share.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec

from shardwright.clusters.mesh import Mesh, coordinates
from shardwright.errors import PlanError
from shardwright.sharding.ranges import Range, Ranges, Shape, part

REDUCE_OPS = ("sum", "avg", "max", "min")
"""The reductions that the pipeline format knows."""


class Replicate(msgspec.Struct, frozen=True, tag=str.lower, forbid_unknown_fields=True):
    """Every slot along the axis holds the same."""

    def __str__(self) -> str:
        return "Replicate"


class Shard(msgspec.Struct, frozen=True, tag=str.lower, forbid_unknown_fields=True):
    """Each slot along the axis holds its part of dimension ``dim``, a multiple of ``unit``.

    10 heads of 64 have the unit 64: over 4 slots they are 192, 192, 128 and 128.
    """

    dim: int
    unit: int = 1

    def __post_init__(self) -> None:
        if self.dim < 0 or self.unit < 1:
            raise PlanError(
                f"Shard needs a dimension from 0 and a unit from 1 up, found {self.dim} and "
                f"{self.unit}"
            )

    def __str__(self) -> str:
        return f"Shard({self.dim})" if self.unit == 1 else f"Shard({self.dim} by {self.unit})"


class Partial(msgspec.Struct, frozen=True, tag=str.lower, forbid_unknown_fields=True):
    """Each slot along the axis holds a term; reduced by ``op`` they make the tensor."""

    op: str = "sum"

    def __post_init__(self) -> None:
        if self.op not in REDUCE_OPS:
            raise PlanError(f"Partial knows {', '.join(REDUCE_OPS)}, found {self.op!r}")

    def __str__(self) -> str:
        return f"Partial({self.op})"


Placement = Replicate | Shard | Partial
Placements = tuple[Placement, ...]
"""One placement a mesh axis, the outermost axis first."""

_PLACEMENT = re.compile(
    r"Replicate|Shard\((?P<dim>\d+)(?: by (?P<unit>\d+))?\)|Partial(?:\((?P<op>\w+)\))?"
)


def parse_placement(text: str) -> Placement:
    """The placement that prints as ``text``; ``Partial`` alone is a sum."""
    match = _PLACEMENT.fullmatch(text)
    if match is None:
        raise PlanError(
            f"{text!r} is no placement; there are Replicate, Shard(dim), Shard(dim by unit) and "
            f"Partial(op)"
        )
    if match["dim"] is not None:
        return Shard(int(match["dim"]), int(match["unit"] or 1))
    return Replicate() if text == "Replicate" else Partial(match["op"] or "sum")


# --- layouts --------------------------------------------------------------------------------------


_LINEAR = {"sum", "avg"}
"""Reductions that may be done in any order."""


class Layout(msgspec.Struct, frozen=True):
    """One placement a mesh axis, the outermost axis first.

    Raises PlanError where two reductions meet whose order would matter (a maximum of sums).
    """

    placements: Placements

    def __post_init__(self) -> None:
        ops = {p.op for p in self.placements if isinstance(p, Partial)}
        if len(ops) > 1 and not ops <= _LINEAR:
            raise PlanError(
                f"the layout {self} mixes reductions whose order matters; reduce one of them first"
            )

    @classmethod
    def of(cls, *placements: Placement) -> Layout:
        """The layout with these placements."""
        return cls(placements)

    @classmethod
    def replicated(cls, mesh: Mesh) -> Layout:
        """All of the tensor on every slot."""
        return cls((Replicate(),) * mesh.ndim)

    @classmethod
    def parse(cls, text: str) -> Layout:
        """The layout that prints as ``text``.

        >>> Layout.parse("[Shard(0), Replicate]") == Layout.of(Shard(0), Replicate())
        True
        """
        inside = text.strip()
        if not (inside.startswith("[") and inside.endswith("]")):
            raise PlanError(f"a layout looks like [Shard(0), Replicate], found {text!r}")
        entries = inside[1:-1].split(",") if inside[1:-1].strip() else []
        return cls(tuple(parse_placement(entry.strip()) for entry in entries))

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.placements))}]"

    def replace(self, axis: int, placement: Placement) -> Layout:
        """The same layout with another placement along ``axis``."""
        return Layout((*self.placements[:axis], placement, *self.placements[axis + 1 :]))

    def partial_axes(self, mesh: Mesh) -> tuple[int, ...]:
        """The axes along which the slots hold different terms: those of more than one slot."""
        return tuple(
            axis
            for axis, (found, size) in enumerate(zip(self.placements, mesh.sizes, strict=True))
            if isinstance(found, Partial) and size > 1
        )

    def check(self, mesh: Mesh, shape: Shape) -> None:
        """Raise PlanError where a tensor of this shape cannot have this layout on the mesh."""
        if len(self.placements) != mesh.ndim:
            raise PlanError(
                f"the layout {self} has {len(self.placements)} placements, but the mesh "
                f"({mesh}) has {mesh.ndim} axes; give one placement an axis"
            )
        for axis, placement in enumerate(self.placements):
            if isinstance(placement, Shard) and placement.dim >= len(shape):
                raise PlanError(
                    f"the layout {self} splits dimension {placement.dim} over axis "
                    f"{mesh.axes[axis]!r}, but the tensor has the shape {list(shape)}"
                )
        for cut in cuts(self.placements, mesh.sizes, shape):
            if not cut.fits:
                raise PlanError(
                    f"the layout {self} cuts dimension {cut.shard.dim} over axis "
                    f"{mesh.axes[cut.axis]!r} at multiples of {cut.shard.unit}, but what it cuts "
                    f"there has the length {' or '.join(map(str, cut.lengths))}"
                )

    def normal(self, mesh: Mesh, shape: Shape) -> Layout:
        """The layout that says the same in the fewest words.

        Replicate along axes of one slot, and no unit where a cut is even: layouts that give every
        slot the same have the same normal form, unless the tensor is empty.
        """
        if not (self.placements or mesh.sizes):
            return self
        self.check(mesh, shape)
        return Layout(normal_form(self.placements, mesh.sizes, shape))

    def slices(self, mesh: Mesh, shape: Shape) -> tuple[Ranges, ...]:
        """Which slice of a whole of ``shape`` each slot holds, in the order of ``mesh.devices``.

        Slices may be empty where a dimension is shorter than the number of its parts.
        """
        self.check(mesh, shape)
        return cut_slices(self.placements, mesh.sizes, shape)


# --- cuts -----------------------------------------------------------------------------------------
#
# Where several axes split one dimension, the outermost axis cuts the whole, the next cuts each of
# its parts, and so on. Every cut is as even as multiples of its unit can be, larger parts first: 10
# over 4 is 3, 3, 2, 2, and 10 over 2 × 2 is 5, 5 and then 3, 2, 3, 2.
#
# Invariant, where every cut `fits`: the distinct slices tile the whole; along a dimension
# their sizes differ by at most the largest unit, and the first slot's is the largest. The innermost
# cut of a dimension can change while the outer ones stay.


Lengths = tuple[int, ...]
"""The distinct lengths of ranges, ascending."""


class LayoutCut(NamedTuple):
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


def cuts(placements: Placements, sizes: Sequence[int], shape: Shape) -> Iterator[LayoutCut]:
    """Every cut that a layout makes, the outermost first; an axis of one slot makes none."""
    lengths: list[Lengths] = [(size,) for size in shape]
    for axis, (placement, parts) in enumerate(zip(placements, sizes, strict=True)):
        if isinstance(placement, Shard) and parts > 1:
            cut = LayoutCut(axis, placement, parts, lengths[placement.dim])
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


def _spans(size: int, made: Sequence[LayoutCut], sizes: tuple[int, ...]) -> list[Range]:
    """The range of one dimension at each coordinate."""
    spans = []
    for coordinate in coordinates(sizes):
        span = (0, size)
        for cut in made:
            span = part(span, cut.parts, coordinate[cut.axis], cut.shard.unit)
        spans.append(span)
    return spans
