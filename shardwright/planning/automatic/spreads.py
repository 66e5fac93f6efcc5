"""A graph spread over the inner axes of each mesh shape that is tried, as little as possible anew.

Comes in: a model or training step. Goes out: its `Spread` over a shape, and what `build` needs to
know of how it was made ready: which fused products are taken apart. Fusing, splits along one axis
and what follows from a graph alone are worked out once for all shapes that share them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shardwright.errors import PlanError
from shardwright.ir import IRGraph
from shardwright.ir.steps import is_step
from shardwright.layout import Cluster
from shardwright.planning.automatic.shapes import Shape
from shardwright.planning.batch import batch_rows
from shardwright.planning.forward import forward_view
from shardwright.planning.mesh import DATA, compatible
from shardwright.planning.plan import Split, Terms
from shardwright.planning.prediction.source import Forward, Splits
from shardwright.planning.prediction.spread import Spread
from shardwright.planning.prediction.spreading import spread_over
from shardwright.planning.shard_norms import has_shards
from shardwright.planning.splits import SPLITTERS, TAKES_APART, all_apart, take_apart
from shardwright.planning.splitting.layouts import best_splits
from shardwright.planning.step import as_step
from shardwright.profiling.cost import Costs

SEVERAL = 2
"""Microbatches that stand for any number of more than one."""

_Column = list[Split | Terms | None]


@dataclass(slots=True)
class Spreads:
    """A graph's spreads by shape; `over` gives them."""

    graph: IRGraph
    cluster: Cluster
    costs: Costs
    training: bool = field(init=False)
    _apart: dict[tuple[tuple[str, int], ...], tuple[IRGraph, tuple[int, ...]]] = field(
        default_factory=dict
    )
    _all_apart: IRGraph | None = None
    _forwards: dict[tuple[tuple[int, ...], int, bool], Forward] = field(default_factory=dict)
    _columns: dict[tuple[int, str, int], _Column] = field(default_factory=dict)
    _spreads: dict[tuple[tuple[tuple[str, int], ...], bool, int], Spread] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        self.training = is_step(self.graph)

    def apart(self, shape: Shape) -> tuple[IRGraph, tuple[int, ...]]:
        """The graph with fused products taken apart, and their positions in the graph."""
        axes = tuple((axis, size) for axis, size in shape.inner if axis in TAKES_APART)
        if axes not in self._apart:
            if axes and self._all_apart is None:
                self._all_apart = all_apart(self.graph)
            self._apart[axes] = take_apart(self.graph, dict(axes), self._all_apart)
        return self._apart[axes]

    def forward(self, shape: Shape, *, single: bool = False) -> Forward:
        """What a shape's splits are of.

        A step of a ``single`` microbatch has its losses' means as they are, where one of several
        has quotients of sums (`step`).
        """
        apart, unfused = self.apart(shape)
        key = unfused, shape.shards if self._mixes(shape.shards) else 1, single and self.training
        if key not in self._forwards:
            self._forwards[key] = self._made_ready(apart, *key[1:])
        return self._forwards[key]

    def _mixes(self, shards: int) -> bool:
        """Whether the number of data shards changes the graph: batch norms have each their own."""
        rows = batch_rows(self.graph) if self.training and shards > 1 else 0
        return rows > 0 and any(
            has_shards(self.graph, node, rows, shards) for node in self.graph.nodes
        )

    def _made_ready(self, apart: IRGraph, shards: int, single: bool) -> Forward:
        if not self.training:
            return Forward(apart, apart, frozenset(), training=False)
        step = as_step(apart, 1 if single else SEVERAL, shards)
        return Forward(step.graph, forward_view(step.graph), step.prepare, training=True)

    def over(self, shape: Shape, microbatches: int = SEVERAL) -> Spread:
        """The graph spread over a shape, of a step of so many microbatches.

        How many they are matters only to the best splits. Raises PlanError where an axis can split
        nothing of the graph.
        """
        count = microbatches if shape.best else min(microbatches, SEVERAL)
        key = shape.inner, shape.best, count if self.training else 1
        if key not in self._spreads:
            source = self.forward(shape, single=microbatches == 1)
            mesh = shape.ranks(self.cluster)[0]
            splits, reasons = self._chosen(source, shape, microbatches)
            self._spreads[key] = spread_over(
                source, mesh, splits, self.cluster, self.costs, reasons
            )
        return self._spreads[key]

    def _chosen(
        self, source: Forward, shape: Shape, microbatches: int
    ) -> tuple[Sequence[Splits], Sequence[str]]:
        """What the inner axes split of each node, and reasons where they are known."""
        if not shape.best:
            return self._splits(source, shape), ()
        axes = dict(shape.inner)
        fixed = {DATA: self._column(source, DATA, axes[DATA])} if DATA in axes else {}
        chosen = best_splits(
            source.view,
            axes,
            cluster=self.cluster,
            costs=self.costs,
            training=self.training,
            fixed=fixed,
            microbatches=microbatches,
        )
        return chosen.splits, chosen.reasons

    def _splits(self, source: Forward, shape: Shape) -> list[Splits]:
        """As `split_nodes`, each axis by itself once."""
        columns = [self._column(source, axis, size) for axis, size in shape.inner]
        sizes = [size for _, size in shape.inner]
        rows: list[Splits] = [*zip(*columns, strict=True)] if columns else [()] * len(source.kinds)
        if len(sizes) < 2:
            return rows
        known: dict[tuple[int, Splits], Splits] = {}
        for i, row in enumerate(rows):
            key = source.kinds[i], row
            if key not in known:
                known[key] = compatible(source.view, source.view.nodes[i], sizes, row)
            rows[i] = known[key]
        return rows

    def _column(self, source: Forward, axis: str, size: int) -> _Column:
        key = id(source), axis, size
        if key not in self._columns:
            self._columns[key] = SPLITTERS[axis](source.view, size).splits()
        if not any(self._columns[key]):
            raise PlanError(f"the mesh axis {axis!r} of {size} slots splits nothing of the graph")
        return self._columns[key]
