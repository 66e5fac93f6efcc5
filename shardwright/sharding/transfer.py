"""The cheapest way from a layout on one mesh to a layout on another.

`transfer` gives each slot exactly the slices that it lacks, by messages. Input: the mesh and layout
that hold a tensor, and the mesh and layout that want it; the meshes may differ in size and may
share slots. Output: a `Transfer`, which says for each slot of the wanting mesh which pieces it
needs, which slot each comes from, and how they are joined. Invariant: the pieces of a slot tile its
slice, in row-major order; each lies within one slice of the source. A slot that holds a piece
already takes its own. Otherwise one slot that holds it sends it, once to each that needs it; among
replicas the pieces are sharded, larger ones first, each to the one that has sent the least, so that
what any two of them send differs by no more than the largest piece.

`cross` takes partial sums, too, and gives a `Crossing`: steps on the mesh that gives, messages,
steps on the mesh that takes; either may have no steps. Partial sums are reduced before anything is
sent, and reduced to slices where that is cheaper. What the taking mesh wants on every slot may be
sent once in slices and gathered there, which pays where the links between the meshes are slower
than those inside. On one mesh `convert` is the way. Layouts to leave in differ from the source
where it is partial, and layouts to arrive in from the target where it is replicated: along some of
those axes they split a dimension, the same for all. Invariant: no such pair of layouts is cheaper
by the cluster's prices; among equally cheap ones the pair of fewest steps and messages is taken.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache

import msgspec

from shardwright.clusters.cluster import Cluster
from shardwright.clusters.mesh import Mesh
from shardwright.errors import PlanError
from shardwright.sharding.convert import PICOSECOND, Redistribution, convert
from shardwright.sharding.layout import (
    Layout,
    Partial,
    Placement,
    Placements,
    Replicate,
    Shard,
    cuts,
    leaves_none_empty,
)
from shardwright.sharding.ranges import Range, Ranges, Shape, format_ranges, overlap, volume


class TransferPiece(msgspec.Struct, frozen=True):
    """A box of the whole tensor that ``destination`` takes from ``source``."""

    source: str
    destination: str
    ranges: Ranges

    @property
    def is_sent(self) -> bool:
        """Whether it goes from one slot to another."""
        return self.source != self.destination

    def __str__(self) -> str:
        return f"{self.source} -> {self.destination} {format_ranges(self.ranges)}"


class SliceAssembly(msgspec.Struct, frozen=True):
    """How a slot makes its slice, ``ranges``, of ``pieces``.

    ``joins`` are concatenations to do one after the other: ``(dim, count)`` joins each run of
    ``count`` neighbours along ``dim``. Without pieces the slice is empty; one piece is the slice.
    """

    device: str
    ranges: Ranges
    pieces: tuple[TransferPiece, ...]
    joins: tuple[tuple[int, int], ...]


class Transfer(msgspec.Struct, frozen=True):
    """The assemblies of a tensor of ``shape``, one a slot of the wanting mesh, in its order."""

    shape: Shape
    assemblies: tuple[SliceAssembly, ...]

    @property
    def sends(self) -> tuple[TransferPiece, ...]:
        """The messages. Slots that all keep this order cannot wait for one another in a ring."""
        pieces = (piece for assembly in self.assemblies for piece in assembly.pieces)
        return tuple(piece for piece in pieces if piece.is_sent)

    def seconds(self, itemsize: int, cluster: Cluster) -> float:
        """The time of the busiest slot, which sends, and receives, one message at a time."""
        busy: dict[tuple[str, str], float] = {}
        for piece in self.sends:
            link = cluster.among((piece.source, piece.destination))
            spent = link.seconds("send", 2, volume(piece.ranges) * itemsize)
            for side in (("sends", piece.source), ("receives", piece.destination)):
                busy[side] = busy.get(side, 0.0) + spent
        return max(busy.values(), default=0.0)

    def __str__(self) -> str:
        lines = [f"{list(self.shape)}: {len(self.sends)} messages"]
        for assembly in self.assemblies:
            parts = ", ".join(f"{p.source} {format_ranges(p.ranges)}" for p in assembly.pieces)
            lines.append(f"  {assembly.device} {format_ranges(assembly.ranges)}: {parts}")
        return "\n".join(lines)


def transfer(
    source: Layout, target: Layout, *, source_mesh: Mesh, target_mesh: Mesh, shape: Shape
) -> Transfer:
    """The messages that bring a whole of ``shape`` from one mesh and layout to another.

    Raises PlanError where a layout does not fit its mesh or the shape, or is a partial sum.
    """
    return _transfer(source, target, source_mesh, target_mesh, tuple(shape))


@lru_cache(maxsize=1 << 14)
def _transfer(
    source: Layout, target: Layout, source_mesh: Mesh, target_mesh: Mesh, shape: Shape
) -> Transfer:
    for layout, mesh in ((source, source_mesh), (target, target_mesh)):
        _check_no_partial(layout, mesh)
    tiles = _tiles(source_mesh, source.slices(source_mesh, shape))
    grid = [sorted({tile[dim] for tile in tiles}) for dim in range(len(shape))]
    wanted = target.slices(target_mesh, shape)
    needs = [
        _needs(device, box, grid) for device, box in zip(target_mesh.devices, wanted, strict=True)
    ]
    senders = _deal(tiles, [need for found in needs for need in found])
    return Transfer(
        shape,
        tuple(
            _assembly(device, box, found, senders)
            for device, box, found in zip(target_mesh.devices, wanted, needs, strict=True)
        ),
    )


Tiles = dict[Ranges, tuple[str, ...]]
"""The slots that hold each slice of the source."""


class _Need(msgspec.Struct, frozen=True):
    """A piece that a slot wants, and the slice of the source that it lies in."""

    device: str
    ranges: Ranges
    tile: Ranges


def _check_no_partial(layout: Layout, mesh: Mesh) -> None:
    axes = layout.partial_axes(mesh)
    if axes:
        raise PlanError(
            f"{layout} on the mesh {mesh} is a partial sum along axis {mesh.axes[axes[0]]!r}; "
            f"reduce it before it is sent to another mesh"
        )


def _tiles(mesh: Mesh, slices: Sequence[Ranges]) -> Tiles:
    """The distinct slices that are not empty."""
    found: dict[Ranges, list[str]] = {}
    for device, box in zip(mesh.devices, slices, strict=True):
        if volume(box):
            found.setdefault(box, []).append(device)
    return {box: tuple(devices) for box, devices in found.items()}


def _needs(device: str, box: Ranges, grid: Sequence[Sequence[Range]]) -> list[_Need]:
    """The pieces of a slot's slice, row-major: where it meets the grid that the tiles make."""
    spans = [_meeting(span, tiles) for span, tiles in zip(box, grid, strict=True)]
    return [
        _Need(device, tuple(piece for piece, _ in row), tuple(tile for _, tile in row))
        for row in itertools.product(*spans)
    ]


def _meeting(span: Range, tiles: Sequence[Range]) -> list[tuple[Range, Range]]:
    """What a range shares with each range of the tiles along one dimension, and that range."""
    shared = ((overlap(span, tile), tile) for tile in tiles)
    return [(piece, tile) for piece, tile in shared if piece is not None]


def _deal(tiles: Tiles, needs: Sequence[_Need]) -> dict[_Need, str]:
    """The slot that each piece comes from."""
    sent = {device: 0 for holders in tiles.values() for device in holders}
    senders = {need: need.device for need in needs if need.device in tiles[need.tile]}
    missing = [need for need in needs if need not in senders]
    for need in sorted(missing, key=lambda need: -volume(need.ranges)):
        sender = min(tiles[need.tile], key=lambda device: sent[device])
        sent[sender] += volume(need.ranges)
        senders[need] = sender
    return senders


def _assembly(
    device: str, box: Ranges, needs: Sequence[_Need], senders: dict[_Need, str]
) -> SliceAssembly:
    pieces = tuple(TransferPiece(senders[need], device, need.ranges) for need in needs)
    return SliceAssembly(device, box, pieces, _joins(pieces, len(box)))


def _joins(pieces: Sequence[TransferPiece], ndim: int) -> tuple[tuple[int, int], ...]:
    """The last dimension first: there neighbours in row-major order are neighbours in space."""
    counts = [len({piece.ranges[dim] for piece in pieces}) for dim in range(ndim)]
    return tuple((dim, counts[dim]) for dim in reversed(range(ndim)) if counts[dim] > 1)


# --- with partial sums and gathers ----------------------------------------------------------------


class Crossing(msgspec.Struct, frozen=True):
    """Steps on the mesh that gives, messages to the mesh that takes, steps there."""

    before: Redistribution
    transfer: Transfer
    after: Redistribution
    seconds: float

    def __str__(self) -> str:
        return f"{self.before}\n{self.transfer}\n{self.after}"


def cross(
    source: Layout,
    target: Layout,
    *,
    source_mesh: Mesh,
    target_mesh: Mesh,
    shape: Shape,
    itemsize: int = 4,
    cluster: Cluster | None = None,
) -> Crossing:
    """The cheapest way from one mesh and layout to another.

    ``shape`` is the whole tensor's, ``itemsize`` bytes an element; without a cluster all slots are
    processes of one host. Raises PlanError where a layout does not fit its mesh or the shape, or
    where the target is a partial sum.
    """
    if cluster is None:
        cluster = Cluster((tuple(dict.fromkeys((*source_mesh.devices, *target_mesh.devices))),))
    return _cross(source, target, source_mesh, target_mesh, tuple(shape), itemsize, cluster)


@lru_cache(maxsize=1 << 14)
def _cross(
    source: Layout,
    target: Layout,
    source_mesh: Mesh,
    target_mesh: Mesh,
    shape: Shape,
    itemsize: int,
    cluster: Cluster,
) -> Crossing:
    leaving = _freed(source.normal(source_mesh, shape), source_mesh, shape, Partial)
    arriving = _freed(target.normal(target_mesh, shape), target_mesh, shape, Replicate)
    befores = [
        convert(source, at, mesh=source_mesh, shape=shape, itemsize=itemsize, cluster=cluster)
        for at in leaving
    ]
    afters = [
        convert(at, target, mesh=target_mesh, shape=shape, itemsize=itemsize, cluster=cluster)
        for at in arriving
    ]
    return _cheapest(befores, afters, itemsize, cluster)


def _freed(
    layout: Layout, mesh: Mesh, shape: Shape, freed: type[Partial] | type[Replicate]
) -> list[Layout]:
    """The layouts that may stand for this one, which differ along axes placed as ``freed``.

    The first replicates along all of them. The others split one dimension along some of them, and
    leave no slot without data.
    """
    found = [*_refilled(layout, mesh, freed, [Replicate()])]
    for dim in range(len(shape)):
        units = {1, *(p.unit for p in layout.placements if isinstance(p, Shard) and p.dim == dim)}
        shards = [Shard(dim, unit) for unit in sorted(units)]
        refilled = _refilled(layout, mesh, freed, [Replicate(), *shards])
        found += [placements for placements in refilled if _is_possible(placements, mesh, shape)]
    return list(dict.fromkeys(Layout(placements).normal(mesh, shape) for placements in found))


def _is_possible(placements: Placements, mesh: Mesh, shape: Shape) -> bool:
    """Whether a tensor can be cut so, and every slot then holds something."""
    fits = all(cut.fits for cut in cuts(placements, mesh.sizes, shape))
    return fits and leaves_none_empty(placements, mesh.sizes, shape)


def _refilled(
    layout: Layout,
    mesh: Mesh,
    freed: type[Partial] | type[Replicate],
    choices: Sequence[Placement],
) -> Iterator[Placements]:
    """Every way to put one of ``choices`` in the place of each placement that is freed."""
    return itertools.product(
        *(
            choices if isinstance(placement, freed) and size > 1 else [placement]
            for placement, size in zip(layout.placements, mesh.sizes, strict=True)
        )
    )


def _cheapest(
    befores: Sequence[Redistribution],
    afters: Sequence[Redistribution],
    itemsize: int,
    cluster: Cluster,
) -> Crossing:
    """The best pair; those whose steps alone cost more than the best found are not looked at."""
    pairs = sorted(itertools.product(befores, afters), key=lambda p: p[0].seconds + p[1].seconds)
    found: list[tuple[int, int, Crossing]] = []
    least = float("inf")
    for before, after in pairs:
        steps = before.seconds + after.seconds
        if steps > least:
            break
        sent = transfer(
            before.target,
            after.source,
            source_mesh=before.mesh,
            target_mesh=after.mesh,
            shape=before.shape,
        )
        seconds = steps + sent.seconds(itemsize, cluster)
        least = min(least, seconds)
        effort = len(before.steps) + len(sent.sends) + len(after.steps)
        found.append((round(seconds / PICOSECOND), effort, Crossing(before, sent, after, seconds)))
    return min(found, key=lambda entry: entry[:2])[2]
