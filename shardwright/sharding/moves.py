"""Moves: the single collectives that take a tensor from one layout to another.

A move changes the placement along one axis of the mesh, for all groups of slots along that axis at
once. The table `KINDS` says which collective does it; `moves` lists those that are right.

A move into or out of ``Shard(dim)`` is right only where its axis is the innermost of those that
split ``dim``. Gathering along an outer axis joins pieces that are no neighbours in the whole: with
``[Shard(0), Shard(0)]`` on 2 × 2, the slots (0, 0) and (1, 0) hold the first and the third quarter.
Slicing along an outer axis would need elements that the slot does not hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from shardwright.clusters.links import Kind
from shardwright.sharding.cuts import Cut, Lengths, cuts
from shardwright.sharding.layout import Layout
from shardwright.sharding.placement import Partial, Placement, Placements, Replicate, Shard
from shardwright.sharding.ranges import Shape

KINDS: Mapping[tuple[type, type], Kind] = {
    (Partial, Replicate): "all_reduce",
    (Partial, Shard): "reduce_scatter",
    (Shard, Replicate): "all_gather",
    (Shard, Shard): "all_to_all",
    (Replicate, Shard): "slice",
}
"""The collective from one placement to another. Nothing leads to ``Partial``."""


class Step(msgspec.Struct, frozen=True):
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
        source, target = self.source, self.target
        found: dict[str, int | str] = {}
        if isinstance(source, Partial):
            found["reduce_op"] = source.op
        if isinstance(source, Shard) and isinstance(target, Shard):
            return {"src_dim": target.dim, "dst_dim": source.dim}
        for placement in (source, target):
            if isinstance(placement, Shard):
                found["dim"] = placement.dim
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
            if _is_normal(Cut(axis, shard, sizes[axis], lengths[shard.dim]))
        ]
        if not isinstance(source, Replicate):
            targets.append(Replicate())
        for target in targets:
            yield axis, (*placements[:axis], target, *placements[axis + 1 :])


def _is_normal(cut: Cut) -> bool:
    """Whether a cut can be made, and does not do what one without a unit does."""
    return cut.shard.unit == 1 or (cut.fits and not cut.is_even)
