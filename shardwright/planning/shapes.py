"""Mesh shapes that a cluster has, and a graph placed on each of them.

A shape is so many pipeline stages, each of so many data and tensor slots; neighbours on a host
stand along the inner axes. `PlacedShapes` places a graph on the inner axes of a shape, as little as
possible anew: fusing, splits along one axis and what follows from the graph alone are worked out
once for all shapes that share them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from shardwright.clusters import Cluster, Mesh
from shardwright.costs.cost import Costs
from shardwright.costs.placed import Forward, PlacedCosts
from shardwright.errors import PlanError
from shardwright.ir import IRGraph
from shardwright.planning.follow import Annotations
from shardwright.planning.forms import GraphForms, Positions
from shardwright.planning.predict import placed_costs
from shardwright.planning.rules import (
    DATA,
    PIPELINE,
    SPLITTERS,
    UNFUSING_AXES,
    UnfusedProducts,
    compatible,
)
from shardwright.planning.splits import best_splits
from shardwright.sharding.strategy import Choice, Choices

FEW = 16
"""Of so few slots, some may stay idle in any number; of more, all are used, or a half, or less."""
TENSOR = "tensor"


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
    def slots(self) -> int:
        """All of them."""
        return self.pipeline * math.prod(size for _, size in self.inner)

    @property
    def shards(self) -> int:
        """Along the axis ``data``."""
        return dict(self.inner).get(DATA, 1)

    def ranks(self, cluster: Cluster) -> tuple[Mesh, ...]:
        """The mesh of each pipeline rank."""
        pipeline = {PIPELINE: self.pipeline} if self.pipeline > 1 else {}
        whole = Mesh.of({**pipeline, **dict(self.inner)}, cluster.devices[: self.slots])
        return whole.along(whole.axis(PIPELINE)) if pipeline else (whole,)


def shapes(cluster: Cluster) -> Iterator[Shape]:
    """All shapes, those that use the most slots first.

    The slots along ``tensor`` are on one host each, and no stage lies half on one host and half on
    another that it shares.
    """
    total = len(cluster.devices)
    host = math.gcd(*map(len, cluster.hosts))
    sizes = range(total, 0, -1) if total <= FEW else _divisors(total)
    for slots in sorted(sizes, reverse=True):
        for per_rank in _divisors(slots):
            if host % per_rank and per_rank % host and len(cluster.hosts) > 1:
                continue
            for tensor in _divisors(math.gcd(per_rank, host)):
                data = ((DATA, per_rank // tensor),) if per_rank > tensor else ()
                inner = (*data, (TENSOR, tensor)) if tensor > 1 else data
                yield Shape(slots // per_rank, inner)


def variants(shape: Shape) -> Iterator[Shape]:
    """The other ways to split over the same mesh, where it has an axis ``tensor``."""
    if TENSOR in dict(shape.inner):
        sequence = tuple(("sequence" if a == TENSOR else a, size) for a, size in shape.inner)
        yield Shape(shape.pipeline, sequence)
        yield Shape(shape.pipeline, shape.inner, best=True)


def _divisors(number: int) -> list[int]:
    return [found for found in range(1, number + 1) if number % found == 0]


@dataclass(slots=True)
class PlacedShapes:
    """A graph placed on the inner axes of each shape, as little as possible anew."""

    graph: IRGraph
    cluster: Cluster
    costs: Costs
    microbatches: int = 1
    forms: GraphForms = field(init=False)
    _apart: dict[object, tuple[IRGraph, Positions]] = field(default_factory=dict)
    _taking: UnfusedProducts | None = None
    _columns: dict[tuple[int, str], list[tuple[range, list[Choice]]]] = field(default_factory=dict)
    """By the id of a forward, and an axis: for these sizes these splits."""
    _annotations: dict[int, Annotations] = field(default_factory=dict)
    _placed: dict[object, PlacedCosts] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.forms = GraphForms(self.graph)

    @property
    def training(self) -> bool:
        """Whether the graph is a training step."""
        return self.forms.training

    def apart(self, shape: Shape) -> tuple[IRGraph, Positions]:
        """The graph with fused products unfused, and their positions in the graph."""
        axes = tuple((axis, size) for axis, size in shape.inner if axis in UNFUSING_AXES)
        if not axes:
            return self.graph, ()
        if axes not in self._apart:
            self._taking = self._taking or UnfusedProducts(self.graph)
            self._apart[axes] = self._taking.over(dict(axes))
            self.forms.note_apart(*self._apart[axes])
        return self._apart[axes]

    def on(self, shape: Shape) -> PlacedCosts:
        """The graph on a shape. Raises PlanError where an axis can split nothing of it."""
        _, unfused = self.apart(shape)
        source = self.forms.forward(unfused, self.microbatches, shape.shards)
        key = shape.inner, shape.best, id(source)
        if key not in self._placed:
            splits, reasons = self._splits(source, shape)
            mesh = shape.ranks(self.cluster)[0]
            self._placed[key] = placed_costs(
                source,
                mesh,
                splits,
                self.cluster,
                self.costs,
                reasons,
                microbatches=self.microbatches,
            )
        return self._placed[key]

    def _splits(self, source: Forward, shape: Shape) -> tuple[Sequence[Choices], Sequence[str]]:
        """What the inner axes split of each node, and reasons where they are known."""
        if shape.best:
            axes = dict(shape.inner)
            fixed = {DATA: self._column(source, DATA, axes[DATA])} if DATA in axes else {}
            chosen = best_splits(
                source.view,
                axes,
                cluster=self.cluster,
                costs=self.costs,
                training=self.training,
                fixed=fixed,
                microbatches=self.microbatches,
            )
            return chosen.splits, chosen.reasons
        columns = [self._column(source, axis, size) for axis, size in shape.inner]
        sizes = [size for _, size in shape.inner]
        if not columns:
            return [()] * len(source.view.nodes), ()
        known: dict[object, Choices] = {}
        rows = []
        for i, row in enumerate(zip(*columns, strict=True)):
            key = source.outline.kinds[i], row
            if key not in known:
                known[key] = compatible(source.view, source.view.nodes[i], sizes, row)
            rows.append(known[key])
        return rows, ()

    def _column(self, source: Forward, axis: str, size: int) -> list[Choice]:
        """What an axis splits of each node; found anew only where its size makes a difference."""
        known = self._columns.setdefault((id(source), axis), [])
        found = next((column for sizes, column in known if size in sizes), None)
        if found is None:
            if id(source) not in self._annotations:
                self._annotations[id(source)] = Annotations(source.view)
            following = SPLITTERS[axis](source.view, size, self._annotations[id(source)])
            found = following.splits()
            known.append((following.sizes, found))
        if not any(found):
            raise PlanError(f"the mesh axis {axis!r} of {size} slots splits nothing of the graph")
        return found
