"""The cheapest way from a layout on one mesh to a layout on another.

Input: as for `transfer`, and the source may be a partial sum. Output: a `Crossing`: steps on
the mesh that gives, messages, steps on the mesh that takes. Either may have no steps.

Partial sums are reduced before anything is sent, and reduced to slices where that is cheaper. What
the taking mesh wants on every slot may be sent once in slices and gathered there, which pays where
the links between the meshes are slower than those inside. On one mesh `convert` is the way.

Layouts to leave in differ from the source where it is partial, and layouts to arrive in from the
target where it is replicated: along some of those axes they split a dimension, the same for all.

Invariant: no such pair of layouts is cheaper by the cluster's prices; among equally cheap
ones the pair of fewest steps and messages is taken.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache

import msgspec

from shardwright.clusters.cluster import Cluster
from shardwright.clusters.mesh import Mesh
from shardwright.sharding.convert import PICOSECOND, Redistribution, convert
from shardwright.sharding.layout import Layout, cuts, leaves_none_empty
from shardwright.sharding.placement import Partial, Placement, Placements, Replicate, Shard
from shardwright.sharding.ranges import Shape
from shardwright.sharding.transfer import Transfer, transfer


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
