"""Layouts: how the slots of a mesh hold one tensor.

A layout is one placement a mesh axis. Along an axis with `Replicate` all slots hold the same; with
`Shard(dim)` each holds its part of that dimension (`cuts` says which); with `Partial(op)` each
holds a term, and the tensor is the reduction of all terms.

What always holds: a layout prints as text that parses back to it. Along an axis of one slot all
placements mean the same, and so do all units where a cut is even: `Layout.normal` is the one way
to say it that equal layouts share.
"""

from __future__ import annotations

import msgspec

from shardwright.clusters.mesh import Mesh
from shardwright.errors import PlanError
from shardwright.sharding.cuts import cut_slices, cuts, normal_form
from shardwright.sharding.placement import (
    Partial,
    Placement,
    Placements,
    Replicate,
    Shard,
    parse_placement,
)
from shardwright.sharding.ranges import Ranges, Shape

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
        self.check(mesh, shape)
        return Layout(normal_form(self.placements, mesh.sizes, shape))

    def slices(self, mesh: Mesh, shape: Shape) -> tuple[Ranges, ...]:
        """Which slice of a whole of ``shape`` each slot holds, in the order of ``mesh.devices``.

        Slices may be empty where a dimension is shorter than the number of its parts.
        """
        self.check(mesh, shape)
        return cut_slices(self.placements, mesh.sizes, shape)
