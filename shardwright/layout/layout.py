"""Layouts: how the slots of a mesh hold one tensor, in the vocabulary of PyTorch's DTensor.

A layout is one placement a mesh axis. Along an axis with `Replicate` all slots hold the same; with
`Shard(dim)` each holds its part of that dimension; with `Partial(op)` each holds a term, and the
tensor is the reduction of all terms.

Where several axes split one dimension, the outermost axis cuts the whole, the next cuts each of
its parts, and so on. Every cut is as even as can be, larger parts first: 10 over 4 is 3, 3, 2, 2,
and 10 over 2 × 2 is 5, 5 and then 3, 2, 3, 2.

What always holds: the distinct slices of a layout tile the whole; along a dimension their sizes
differ by at most one, and the first slot's is the largest. Changing the placement of the innermost
axis that splits a dimension leaves the cuts of the outer ones as they are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from functools import lru_cache

import msgspec

from shardwright.errors import PlanError
from shardwright.layout.mesh import Mesh, coordinates
from shardwright.layout.ranges import Range, Ranges, Shape, part

REDUCE_OPS = ("sum", "avg", "max", "min")
"""The reductions that the pipeline format knows."""
_LINEAR = {"sum", "avg"}


class Replicate(msgspec.Struct, frozen=True, tag=str.lower):
    """Every slot along the axis holds the same."""

    def __str__(self) -> str:
        return "Replicate"


class Shard(msgspec.Struct, frozen=True, tag=str.lower):
    """Each slot along the axis holds its part of dimension ``dim``."""

    dim: int

    def __post_init__(self) -> None:
        if self.dim < 0:
            raise PlanError(f"Shard needs a dimension from 0 up, found {self.dim}")

    def __str__(self) -> str:
        return f"Shard({self.dim})"


class Partial(msgspec.Struct, frozen=True, tag=str.lower):
    """Each slot along the axis holds a term; reduced by ``op`` they make the tensor."""

    op: str = "sum"

    def __post_init__(self) -> None:
        if self.op not in REDUCE_OPS:
            raise PlanError(f"Partial knows {', '.join(REDUCE_OPS)}, found {self.op!r}")

    def __str__(self) -> str:
        return f"Partial({self.op})"


Placement = Replicate | Shard | Partial
Placements = tuple[Placement, ...]

_PLACEMENT = re.compile(r"Replicate|Shard\((?P<dim>\d+)\)|Partial(?:\((?P<op>\w+)\))?")


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
        return cls(tuple(_parse_placement(entry.strip(), text) for entry in entries))

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.placements))}]"

    def replace(self, axis: int, placement: Placement) -> Layout:
        """The same layout with another placement along ``axis``."""
        return Layout((*self.placements[:axis], placement, *self.placements[axis + 1 :]))

    def axes_of(self, dim: int) -> tuple[int, ...]:
        """The axes that split a dimension, the outermost first."""
        return tuple(axis for axis, found in enumerate(self.placements) if found == Shard(dim))

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

    def slices(self, mesh: Mesh, shape: Shape) -> tuple[Ranges, ...]:
        """Which slice of a whole of ``shape`` each slot holds, in the order of ``mesh.devices``.

        Slices may be empty where a dimension is shorter than the number of its parts.
        """
        self.check(mesh, shape)
        return _slices(self.placements, mesh.sizes, shape)


def largest_shape(placements: Placements, sizes: Iterable[int], shape: Shape) -> Shape:
    """The shape of the largest slice, which is the first slot's."""
    largest = list(shape)
    for placement, size in zip(placements, sizes, strict=True):
        if isinstance(placement, Shard):
            largest[placement.dim] = -(-largest[placement.dim] // size)
    return tuple(largest)


def leaves_none_empty(placements: Placements, sizes: Iterable[int], shape: Shape) -> bool:
    """Whether every slot holds something of a tensor that is not empty itself."""
    parts = [1] * len(shape)
    for placement, size in zip(placements, sizes, strict=True):
        if isinstance(placement, Shard):
            parts[placement.dim] *= size
    return all(parts[dim] <= max(size, 1) for dim, size in enumerate(shape))


@lru_cache(maxsize=4096)
def _slices(placements: Placements, sizes: tuple[int, ...], shape: Shape) -> tuple[Ranges, ...]:
    """The slice at each coordinate."""
    spans = [_spans(placements, sizes, dim, size) for dim, size in enumerate(shape)]
    return tuple(zip(*spans, strict=True)) if spans else ((),) * math.prod(sizes)


def _spans(placements: Placements, sizes: tuple[int, ...], dim: int, size: int) -> list[Range]:
    """The range of one dimension at each coordinate."""
    spans = []
    for coordinate in coordinates(sizes):
        span = (0, size)
        for axis, placement in enumerate(placements):
            if placement == Shard(dim):
                span = part(span, sizes[axis], coordinate[axis])
        spans.append(span)
    return spans


def _parse_placement(entry: str, text: str) -> Placement:
    match = _PLACEMENT.fullmatch(entry)
    if match is None:
        raise PlanError(
            f"{entry!r} in the layout {text!r} is no placement; there are Replicate, Shard(dim) "
            f"and Partial(op)"
        )
    if match["dim"] is not None:
        return Shard(int(match["dim"]))
    if entry == "Replicate":
        return Replicate()
    return Partial(match["op"] or "sum")
