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
from functools import cached_property

from shardwright.clusters import Cluster, Mesh
from shardwright.costs.cost import Costs
from shardwright.costs.placed import Forward, PlacedCosts
from shardwright.errors import PlanError
from shardwright.ir import IRGraph
from shardwright.ir.graph import is_step
from shardwright.ops.independence import Annotations
from shardwright.planning.plan import fingerprint_graph
from shardwright.planning.predict import forward_of_step, placed_costs
from shardwright.planning.rules import (
    DATA,
    PIPELINE,
    SPLITTERS,
    UnfusedProducts,
    compatible,
)
from shardwright.planning.splits import best_splits
from shardwright.planning.step import PreparedStep, as_step, is_mixed_by_shards
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


@dataclass
class PlacedShapes:
    """A graph in the forms that shapes need, and placed on their inner axes; each is made once.

    ``microbatches`` are those of a training step. Where `as_step` gives the same for two numbers of
    data shards, it is one form.
    """

    graph: IRGraph
    cluster: Cluster
    costs: Costs
    microbatches: int = 1
    _products: UnfusedProducts = field(init=False)
    _steps: dict[object, PreparedStep] = field(default_factory=dict)
    _forwards: dict[object, Forward] = field(default_factory=dict)
    _mixed: dict[int, bool] = field(default_factory=dict)
    """By number of data shards."""
    _columns: dict[tuple[int, str, int], list[Choice]] = field(default_factory=dict)
    """By the id of a forward, an axis and its size."""
    _annotations: dict[int, Annotations] = field(default_factory=dict)
    _placed: dict[object, PlacedCosts] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._products = UnfusedProducts(self.graph)

    @cached_property
    def training(self) -> bool:
        """Whether the graph is a training step."""
        return is_step(self.graph)

    @cached_property
    def fingerprint(self) -> str:
        """The graph's."""
        return fingerprint_graph(self.graph)

    def apart(self, shape: Shape) -> tuple[IRGraph, tuple[int, ...]]:
        """The graph with fused products unfused, and their positions in the graph."""
        return self._products.over(dict(shape.inner))

    def step(self, shape: Shape) -> PreparedStep:
        """The training step, each of whose microbatches is split over data shards."""
        apart, unfused = self.apart(shape)
        shards = self._shards(shape)
        if (unfused, shards) not in self._steps:
            self._steps[unfused, shards] = as_step(apart, self.microbatches, shards)
        return self._steps[unfused, shards]

    def forward(self, shape: Shape) -> Forward:
        """What is placed of the graph: the step's forward; of a model, all of it."""
        apart, unfused = self.apart(shape)
        key = unfused, self._shards(shape)
        if key not in self._forwards:
            step = self.training and forward_of_step(self.step(shape))
            self._forwards[key] = step or Forward(apart, apart)
        return self._forwards[key]

    def _shards(self, shape: Shape) -> int:
        """The data shards, where their number changes the graph as it does batch norms."""
        shards = shape.shards
        if shards not in self._mixed:
            self._mixed[shards] = self.training and is_mixed_by_shards(self.graph, shards)
        return shards if self._mixed[shards] else 1

    def on(self, shape: Shape) -> PlacedCosts:
        """The graph on a shape. Raises PlanError where an axis can split nothing of it."""
        source = self.forward(shape)
        key = shape.inner, shape.best, id(source)
        if key not in self._placed:
            splits, reasons = self._splits(source, shape)
            self._placed[key] = placed_costs(
                source,
                shape.ranks(self.cluster)[0],
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
        """What an axis splits of each node. Raises PlanError where that is nothing."""
        key = id(source), axis, size
        if key not in self._columns:
            if id(source) not in self._annotations:
                self._annotations[id(source)] = Annotations(source.view)
            following = SPLITTERS[axis](source.view, size, self._annotations[id(source)])
            self._columns[key] = following.splits()
        if not any(self._columns[key]):
            raise PlanError(f"the mesh axis {axis!r} of {size} slots splits nothing of the graph")
        return self._columns[key]
