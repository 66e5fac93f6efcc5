"""Meshes: device slots in a grid of up to three named axes.

Input: names and sizes of the axes, and the ids of the slots in row-major order (the last axis
runs fastest). Output: coordinates of a slot, the groups of slots that a collective along an axis
joins, and the smaller meshes that stand along an axis.

Invariant: every slot stands once in the mesh; the product of the sizes is the number of
slots. A mesh without axes is one slot by itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import msgspec

from shardwright.errors import PlanError

MAX_AXES = 3
"""The search over layouts grows with the power of the axes; three are what parallelism uses."""

Coordinate = tuple[int, ...]
Group = tuple[str, ...]


class Mesh(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A grid of device slots.

    ``axes`` are the names of the axes, the outermost first, ``sizes`` their sizes, and ``devices``
    the ids of the slots in row-major order. Raises PlanError where they do not make a grid.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    devices: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.sizes):
            raise PlanError(f"a mesh has {len(self.axes)} axes, but {len(self.sizes)} sizes")
        if len(self.axes) > MAX_AXES:
            raise PlanError(f"a mesh has {len(self.axes)} axes; at most {MAX_AXES} are possible")
        for kind, names in (("axis", self.axes), ("device slot", self.devices)):
            if len(set(names)) < len(names):
                twice = next(name for name in names if names.count(name) > 1)
                raise PlanError(f"a mesh names the {kind} {twice!r} twice")
        for axis, size in zip(self.axes, self.sizes, strict=True):
            if type(size) is not int or size < 1:
                raise PlanError(f"mesh axis {axis!r} must have a size from 1 up, found {size!r}")
        if math.prod(self.sizes) != len(self.devices):
            raise PlanError(
                f"a mesh of {self._grid()} needs {math.prod(self.sizes)} device slots, "
                f"found {len(self.devices)}"
            )

    @classmethod
    def of(cls, axes: Mapping[str, int], devices: Sequence[str] | None = None) -> Mesh:
        """A mesh from sizes by axis name; without ``devices`` its slots are d0, d1, ….

        >>> print(Mesh.of({"data": 2, "tensor": 2}))
        data 2 × tensor 2: d0 d1 d2 d3
        """
        sizes = tuple(axes.values())
        if devices is None:
            devices = [f"d{i}" for i in range(math.prod(sizes))]
        return cls(tuple(axes), sizes, tuple(devices))

    def __str__(self) -> str:
        names = (
            self.devices if len(self.devices) <= 16 else (*self.devices[:2], "…", self.devices[-1])
        )
        return f"{self._grid()}: {' '.join(names)}"

    @property
    def ndim(self) -> int:
        """How many axes."""
        return len(self.axes)

    def axis(self, name: str) -> int:
        """The position of the axis of that name."""
        if name not in self.axes:
            raise PlanError(f"the mesh {self._grid()} has no axis {name!r}")
        return self.axes.index(name)

    def coordinates(self) -> tuple[Coordinate, ...]:
        """The coordinate of each slot, in the order of ``devices``."""
        return coordinates(self.sizes)

    def coordinate(self, device: str) -> Coordinate:
        """The coordinate of one slot."""
        if device not in self.devices:
            raise PlanError(f"the device slot {device!r} is not in the mesh {self}")
        return self.coordinates()[self.devices.index(device)]

    def groups(self, axis: int) -> tuple[Group, ...]:
        """The slots that differ along ``axis`` only: one group each, in the order of the axis.

        Groups stand in the row-major order of the other axes.
        """
        return tuple(zip(*(piece.devices for piece in self.along(axis)), strict=True))

    def along(self, axis: int) -> tuple[Mesh, ...]:
        """The meshes, one axis less, that stand along ``axis``: the stages of a pipeline axis."""
        axes = self.axes[:axis] + self.axes[axis + 1 :]
        sizes = self.sizes[:axis] + self.sizes[axis + 1 :]
        found: list[list[str]] = [[] for _ in range(self.sizes[axis])]
        for device, coordinate in zip(self.devices, self.coordinates(), strict=True):
            found[coordinate[axis]].append(device)
        return tuple(Mesh(axes, sizes, tuple(devices)) for devices in found)

    def _grid(self) -> str:
        named = zip(self.axes, self.sizes, strict=True)
        return " × ".join(f"{axis} {size}" for axis, size in named) or "one slot"


@lru_cache(maxsize=1024)
def coordinates(sizes: tuple[int, ...]) -> tuple[Coordinate, ...]:
    """All coordinates of a grid, row-major."""
    return tuple(itertools.product(*(range(size) for size in sizes)))
