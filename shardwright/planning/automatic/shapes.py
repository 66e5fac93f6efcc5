"""Mesh shapes that a cluster has: so many pipeline stages, each of so many data and tensor slots.

Comes in: a cluster. Goes out: shapes, each with the slots that it takes: neighbours on a host stand
along the inner axes. What always holds: the slots along ``tensor`` or ``sequence`` are on one host
each, and no stage lies half on one host and half on another that it shares.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shardwright.clusters import Cluster, Mesh
from shardwright.planning.rules import DATA, PIPELINE

TENSOR = "tensor"
FEW = 16
"""Of so few slots, some may stay idle in any number; of more, all are used, or a half, or less."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How many pipeline ranks, and the inner axes of each with their sizes, those of 1 left out.

    ``best`` says that what the inner axes split is searched for, not found by the axes' rules.
    """

    pipeline: int
    inner: tuple[tuple[str, int], ...] = ()
    best: bool = False

    def __str__(self) -> str:
        pipeline = [(PIPELINE, self.pipeline)] if self.pipeline > 1 else []
        text = " × ".join(f"{axis} {size}" for axis, size in (*pipeline, *self.inner)) or "one slot"
        return f"{text} with the best splits" if self.best else text

    @property
    def per_rank(self) -> int:
        """The slots of a pipeline rank."""
        return math.prod(size for _, size in self.inner)

    @property
    def slots(self) -> int:
        """All of them."""
        return self.pipeline * self.per_rank

    @property
    def shards(self) -> int:
        """Along the axis ``data``."""
        return dict(self.inner).get(DATA, 1)

    def axes(self) -> Mapping[str, int]:
        """Of the whole mesh, the outermost first."""
        pipeline = {PIPELINE: self.pipeline} if self.pipeline > 1 else {}
        return {**pipeline, **dict(self.inner)}

    def ranks(self, cluster: Cluster) -> tuple[Mesh, ...]:
        """The mesh of each pipeline rank."""
        whole = Mesh.of(self.axes(), cluster.devices[: self.slots])
        return whole.along(whole.axis(PIPELINE)) if self.pipeline > 1 else (whole,)


def shapes(cluster: Cluster) -> Iterator[Shape]:
    """All shapes, those that use the most slots first."""
    total = len(cluster.devices)
    host = math.gcd(*map(len, cluster.hosts))
    sizes = range(total, 0, -1) if total <= FEW else _divisors(total)
    for slots in sorted(sizes, reverse=True):
        for per_rank in _divisors(slots):
            if host % per_rank and per_rank % host and len(cluster.hosts) > 1:
                continue
            for tensor in _divisors(math.gcd(per_rank, host)):
                data = ((DATA, per_rank // tensor),) if per_rank > tensor else ()
                pipeline = slots // per_rank
                yield Shape(pipeline, (*data, (TENSOR, tensor)) if tensor > 1 else data)


def variants(shape: Shape) -> Iterator[Shape]:
    """The other ways to split over the same mesh, where it has an axis ``tensor``."""
    if TENSOR in dict(shape.inner):
        sequence = tuple(("sequence" if a == TENSOR else a, size) for a, size in shape.inner)
        yield Shape(shape.pipeline, sequence)
        yield Shape(shape.pipeline, shape.inner, best=True)


def _divisors(number: int) -> list[int]:
    return [found for found in range(1, number + 1) if number % found == 0]
