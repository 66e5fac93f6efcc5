"""A graph spread over the inner axes of each mesh shape that is tried, as little as possible anew.

Comes in: a model or training step. Goes out: its `Spread` over a shape, and what `build` needs to
know of how it was made ready: which fused products are taken apart. Fusing, splits along one axis
and what follows from a graph alone are worked out once for all shapes that share them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shardwright.clusters import Cluster
from shardwright.costs.cost import Costs
from shardwright.errors import PlanError
from shardwright.ir import IRGraph
from shardwright.planning.automatic.shapes import Shape
from shardwright.planning.follow import Annotations
from shardwright.planning.plan import Split, Terms
from shardwright.planning.prediction.source import Forward, Splits
from shardwright.planning.prediction.sources import Positions, Sources
from shardwright.planning.prediction.spread import Spread
from shardwright.planning.prediction.spreading import spread_over
from shardwright.planning.rules import DATA, SPLITTERS, TAKES_APART, TakingApart, compatible
from shardwright.planning.splits import best_splits

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
    sources: Sources = field(init=False)
    _apart: dict[tuple[tuple[str, int], ...], tuple[IRGraph, Positions]] = field(
        default_factory=dict
    )
    _taking: TakingApart | None = None
    _columns: dict[tuple[int, str], list[tuple[range, _Column]]] = field(default_factory=dict)
    """By the id of a forward, and an axis: for these sizes these splits."""
    _annotations: dict[int, Annotations] = field(default_factory=dict)
    """By the id of a forward."""
    _spreads: dict[tuple[tuple[tuple[str, int], ...], int, int], Spread] = field(
        default_factory=dict
    )
    """By inner axes, the id of a forward, and for the best splits the number of microbatches."""

    def __post_init__(self) -> None:
        self.sources = Sources(self.graph)
        self.training = self.sources.training

    def apart(self, shape: Shape) -> tuple[IRGraph, Positions]:
        """The graph with fused products taken apart, and their positions in the graph."""
        axes = tuple((axis, size) for axis, size in shape.inner if axis in TAKES_APART)
        if not axes:
            return self.graph, ()
        if axes not in self._apart:
            self._taking = self._taking or TakingApart(self.graph)
            self._apart[axes] = self._taking.over(dict(axes))
            self.sources.note_apart(*self._apart[axes])
        return self._apart[axes]

    def forward(self, shape: Shape, *, single: bool = False) -> Forward:
        """What a shape's splits are of.

        A step of a ``single`` microbatch has its losses' means as they are, where one of several
        has quotients of sums (`step`).
        """
        _, unfused = self.apart(shape)
        return self.sources.forward(unfused, 1 if single else SEVERAL, shape.shards)

    def over(self, shape: Shape, microbatches: int = SEVERAL) -> Spread:
        """The graph spread over a shape, of a step of so many microbatches.

        How many they are matters only to the best splits. Raises PlanError where an axis can split
        nothing of the graph.
        """
        source = self.forward(shape, single=microbatches == 1)
        count = microbatches if self.training else 1
        key = shape.inner, id(source), count if shape.best else 0
        if key not in self._spreads:
            splits, reasons = self._chosen(source, shape, microbatches)
            mesh = shape.ranks(self.cluster)[0]
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
        """What an axis splits of each node; found anew only where its size makes a difference."""
        known = self._columns.setdefault((id(source), axis), [])
        found = next((column for sizes, column in known if size in sizes), None)
        if found is None:
            following = SPLITTERS[axis](source.view, size, self._annotations_of(source))
            found = following.splits()
            known.append((following.sizes, found))
        if not any(found):
            raise PlanError(f"the mesh axis {axis!r} of {size} slots splits nothing of the graph")
        return found

    def _annotations_of(self, source: Forward) -> Annotations:
        if id(source) not in self._annotations:
            self._annotations[id(source)] = Annotations(source.view)
        return self._annotations[id(source)]
