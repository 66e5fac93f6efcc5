"""The cheapest way from one layout of a tensor to another, on one mesh.

Input: a mesh, the whole tensor's shape and bytes an element, the layouts that a producer gives
and a consumer wants, and a cluster that prices collectives. Output: a `Redistribution`, the steps
to take; none where the layouts agree.

A move changes the placement along one axis of the mesh, for all groups of slots along that axis at
once. The table `KINDS` says which collective does it; `moves` lists those that are right. One into
or out of ``Shard(dim)`` is right only where its axis is the innermost of those that split ``dim``.
Gathering along an outer axis joins pieces that are no neighbours in the whole: with
``[Shard(0), Shard(0)]`` on 2 × 2, the slots (0, 0) and (1, 0) hold the first and the third quarter.
Slicing along an outer axis would need elements that the slot does not hold.

The way is found by Dijkstra's search over layouts, along the `moves` that are right. What a move
costs depends on how much the slots hold at that moment, so it may pay to slice along one axis
before communicating along another. No step cuts so finely that a slot is left without data, unless
the target does.

Invariant: no sequence of right moves is cheaper by the cluster's prices; among equally
cheap ones the shortest is taken, then the first in the order of axes and placements, so that the
same question always has the same answer. Answers are kept.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import msgspec

from shardwright.clusters.cluster import Cluster
from shardwright.clusters.links import Kind, Links
from shardwright.clusters.mesh import Group, Mesh
from shardwright.communication import COMMUNICATION, CommunicationRow
from shardwright.errors import PlanError
from shardwright.sharding.layout import (
    Layout,
    LayoutCut,
    Lengths,
    Partial,
    Placement,
    Placements,
    Replicate,
    Shard,
    cuts,
    largest_shape,
    leaves_none_empty,
)
from shardwright.sharding.ranges import Ranges, Shape

KINDS: Mapping[tuple[type, type], Kind] = {
    (Partial, Replicate): "all_reduce",
    (Partial, Shard): "reduce_scatter",
    (Shard, Replicate): "all_gather",
    (Shard, Shard): "all_to_all",
    (Replicate, Shard): "slice",
}
"""The collective from one placement to another. Nothing leads to ``Partial``."""
_SLICE = CommunicationRow(cut="dim")


class RedistributionStep(msgspec.Struct, frozen=True):
    """One move, done along mesh axis ``axis`` by every group of slots at once.

    ``before`` and ``after`` are the layouts, which differ in that axis only; ``seconds`` is what
    the cluster model says it takes.
    """

    axis: int
    before: Layout
    after: Layout
    seconds: float = 0.0

    @property
    def kind(self) -> Kind:
        """The communication, or ``slice`` for what each slot does by itself."""
        return move_kind(self.source, self.target)

    @property
    def source(self) -> Placement:
        """The axis's placement before."""
        return self.before.placements[self.axis]

    @property
    def target(self) -> Placement:
        """The axis's placement after."""
        return self.after.placements[self.axis]

    @property
    def metadata(self) -> dict[str, int | str]:
        """The keys of the pipeline format for this kind; for a slice its ``dim``."""
        row = COMMUNICATION.get(self.kind, _SLICE)
        found: dict[str, int | str] = {}
        if isinstance(self.source, Partial):
            found["reduce_op"] = self.source.op
        for key, placement in ((row.cut, self.target), (row.join, self.source)):
            if key is not None and isinstance(placement, Shard):
                found[key] = placement.dim
        return found

    def __str__(self) -> str:
        said = ", ".join(f"{key} {value}" for key, value in self.metadata.items())
        return f"{self.kind} along axis {self.axis} ({said}): {self.before} -> {self.after}"


def move_kind(source: Placement, target: Placement) -> Kind:
    """The collective between two placements that differ."""
    return KINDS[type(source), type(target)]


def moves(
    placements: Placements, sizes: tuple[int, ...], shape: Shape, units: Sequence[Sequence[int]]
) -> Iterator[tuple[int, Placements]]:
    """The axis and the result of every right move from a layout in normal form to another.

    ``shape`` is the whole tensor's, and ``units`` are, for each of its dimensions, those in which
    it may be cut. Axes of one slot never move.
    """
    innermost = [-1] * len(shape)
    lengths: list[Lengths] = [(size,) for size in shape]
    for cut in cuts(placements, sizes, shape):
        innermost[cut.shard.dim], lengths[cut.shard.dim] = cut.axis, cut.left
    for axis, source in enumerate(placements):
        if sizes[axis] == 1 or (isinstance(source, Shard) and innermost[source.dim] > axis):
            continue
        free = (dim for dim, outer in enumerate(innermost) if outer < axis)
        shards = (Shard(dim, unit) for dim in free for unit in units[dim])
        targets: list[Placement] = [
            shard
            for shard in shards
            if _is_normal(LayoutCut(axis, shard, sizes[axis], lengths[shard.dim]))
        ]
        if not isinstance(source, Replicate):
            targets.append(Replicate())
        for target in targets:
            yield axis, (*placements[:axis], target, *placements[axis + 1 :])


def _is_normal(cut: LayoutCut) -> bool:
    """Whether a cut can be made, and does not do what one without a unit does."""
    return cut.shard.unit == 1 or (cut.fits and not cut.is_even)


# --------------------------------------------------------------------------------------------------


PICOSECOND = 1e-12
"""Prices are compared in whole picoseconds: sums of these do not depend on their order."""


class Redistribution(msgspec.Struct, frozen=True):
    """The steps that take a tensor of ``shape`` from one layout to another on a mesh.

    The layouts of the steps are in normal form.
    """

    mesh: Mesh
    shape: Shape
    source: Layout
    target: Layout
    steps: tuple[RedistributionStep, ...]

    @property
    def seconds(self) -> float:
        """What all steps take together."""
        return sum(step.seconds for step in self.steps)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The layout before the first step, and after each, in normal form."""
        return (
            self.source.normal(self.mesh, self.shape),
            *(step.after for step in self.steps),
        )

    def groups(self, step: RedistributionStep) -> tuple[Group, ...]:
        """The slots that take ``step`` together, each group in the order of its members."""
        return self.mesh.groups(step.axis)

    def slices(self, layout: Layout) -> tuple[Ranges, ...]:
        """What each slot holds in one of the layouts, in the order of ``mesh.devices``."""
        return layout.slices(self.mesh, self.shape)

    def __str__(self) -> str:
        lines = [
            f"{list(self.shape)} on {self.mesh}: {self.source} -> {self.target}, "
            f"{len(self.steps)} steps, {self.seconds * 1e6:.1f} µs"
        ]
        return "\n".join([*lines, *(f"  {step}" for step in self.steps)])


def convert(
    source: Layout,
    target: Layout,
    *,
    mesh: Mesh,
    shape: Shape,
    itemsize: int = 4,
    cluster: Cluster | None = None,
) -> Redistribution:
    """The cheapest steps from ``source`` to ``target``.

    ``shape`` is the whole tensor's, ``itemsize`` bytes an element; without a cluster all slots are
    processes of one host. Raises PlanError where a layout does not fit mesh or shape, or where the
    target is a partial sum that the source is not.
    """
    shape = tuple(shape)
    start, goal = source.normal(mesh, shape), target.normal(mesh, shape)
    for axis in goal.partial_axes(mesh):
        if start.placements[axis] != goal.placements[axis]:
            raise PlanError(
                f"no communication turns {source} into {target}: along axis {mesh.axes[axis]!r} "
                f"the target is {goal.placements[axis]}, which only a producer can give"
            )
    links = (cluster or Cluster((mesh.devices,))).links(mesh)
    steps = _cheapest(start.placements, goal.placements, mesh.sizes, shape, itemsize, links)
    return Redistribution(mesh, shape, source, target, steps)


@lru_cache(maxsize=1 << 16)
def _cheapest(
    source: Placements,
    target: Placements,
    sizes: tuple[int, ...],
    shape: Shape,
    itemsize: int,
    links: tuple[Links, ...],
) -> tuple[RedistributionStep, ...]:
    """Dijkstra's search. Labels are (picoseconds, steps, way); the way breaks ties."""
    terrain = _Terrain(target, sizes, shape, itemsize, links, _units(target, len(shape)))
    queue: list[_Label] = [(0, 0, (), source)]
    done: set[Placements] = set()
    while queue:
        spent, length, way, here = heapq.heappop(queue)
        if here == target:
            return terrain.steps(source, way)
        if here in done:
            continue
        done.add(here)
        for axis, there in terrain.moves(here):
            if there not in done:
                price = terrain.price(axis, here, there)
                onward = (*way, (axis, _rank(there[axis])))
                heapq.heappush(queue, (spent + price, length + 1, onward, there))
    raise AssertionError(f"no way from {Layout(source)} to {Layout(target)}")


_Rank = tuple[int, int]
_Way = tuple[tuple[int, _Rank], ...]
"""Moves as (axis, rank of the new placement)."""
_Label = tuple[int, int, _Way, Placements]


def _units(target: Placements, ndim: int) -> list[list[int]]:
    """The units in which a way may cut each dimension: one, and the target's."""
    wanted = {(p.dim, p.unit) for p in target if isinstance(p, Shard)}
    return [sorted({1, *(unit for d, unit in wanted if d == dim)}) for dim in range(ndim)]


@dataclass(frozen=True, slots=True)
class _Terrain:
    """What one search walks on: the moves that lead to a target, and their prices."""

    target: Placements
    sizes: tuple[int, ...]
    shape: Shape
    itemsize: int
    links: tuple[Links, ...]
    units: Sequence[Sequence[int]]
    held: dict[Placements, int] = field(default_factory=dict)

    def moves(self, here: Placements) -> Iterator[tuple[int, Placements]]:
        """The right moves that can be part of a way."""
        for axis, there in moves(here, self.sizes, self.shape, self.units):
            want = self.target[axis]
            if isinstance(want, Partial):
                continue
            coarser = not isinstance(there[axis], Shard)
            if coarser or there[axis] == want or leaves_none_empty(there, self.sizes, self.shape):
                yield axis, there

    def price(self, axis: int, here: Placements, there: Placements) -> int:
        """Picoseconds of a move."""
        kind = move_kind(here[axis], there[axis])
        nbytes = max(self._nbytes(here), self._nbytes(there))
        return round(self.links[axis].seconds(kind, self.sizes[axis], nbytes) / PICOSECOND)

    def steps(self, source: Placements, way: _Way) -> tuple[RedistributionStep, ...]:
        """The moves of a way, one after the other."""
        found, here = [], source
        for axis, rank in way:
            there = (*here[:axis], _ranked(rank), *here[axis + 1 :])
            seconds = self.price(axis, here, there) * PICOSECOND
            found.append(RedistributionStep(axis, Layout(here), Layout(there), seconds))
            here = there
        return tuple(found)

    def _nbytes(self, placements: Placements) -> int:
        """The most bytes that a slot holds."""
        if placements not in self.held:
            largest = largest_shape(placements, self.sizes, self.shape)
            self.held[placements] = math.prod(largest) * self.itemsize
        return self.held[placements]


def _rank(placement: Placement) -> _Rank:
    """The order of placements a move may lead to: Replicate, then Shard by dimension and unit."""
    return (placement.dim + 1, placement.unit) if isinstance(placement, Shard) else (0, 0)


def _ranked(rank: _Rank) -> Placement:
    """The inverse of `_rank`."""
    dim, unit = rank
    return Shard(dim - 1, unit) if dim else Replicate()
