"""The strategies that each node of a graph may choose from, and what each takes to compute.

Comes in: an outline, the axes of a mesh, splits of those axes that are not free, costs of nodes.
Goes out: a `Domain` a node. What always holds: nodes of one kind in the same situation share one
domain object, so that equal layers give equal tables; of strategies whose tensors lie alike the
cheapest is left; every axis that may be left whole is, in some strategy.

In training a node at the head of the graph, before which few values have a gradient, comes in
variants: along an axis along which it and all before it is done whole, its gradients may stay terms
of a sum, and only those of parameters are put together (`building.gradients`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shardwright.costs.cost import Costs
from shardwright.errors import PlanError
from shardwright.ir import IRNode
from shardwright.ir.execute import describe_node
from shardwright.planning.plan import Terms
from shardwright.planning.splitting.strategies import choices
from shardwright.sharding import Partial
from shardwright.sharding.layout import largest_shape
from shardwright.sharding.place import Outline
from shardwright.sharding.ranges import volume, whole
from shardwright.sharding.strategy import CallShapes, Choice, Strategy, strategy

HEAD = 6
"""Values with a gradient that may come before a node whose gradients may stay terms."""
TIE = 1e-17
"""Seconds a byte that a slot makes: of strategies that take as long, the one that makes less."""

Offers = Mapping[int, Sequence[Sequence[Choice]]]
"""By axis number: among what an axis that is not free may choose for each node."""


@dataclass(frozen=True, eq=False)
class Domain:
    """Strategies, and the seconds that each takes to compute, a tie-breaker included."""

    strategies: tuple[Strategy, ...]
    seconds: NDArray[np.float64]
    partial: frozenset[int]
    """Axes along which some strategy makes terms of a sum."""
    single: bool
    """Whether one value at most has a gradient of those that the node makes."""
    is_head: bool
    """Whether strategies say along which axes all up to the node is done whole."""


@dataclass(slots=True)
class Domains:
    """Makes domains, each once. ``run`` gives that of each node."""

    outline: Outline
    sizes: tuple[int, ...]
    costs: Costs
    training: bool
    offers: Offers = field(default_factory=dict)
    head: int = HEAD
    """How many values with a gradient may come before a node of the graph's head."""
    known: dict[object, Domain] = field(default_factory=dict)
    uneven: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By size of an axis: lengths that come out uneven along it."""

    def run(self) -> list[Domain]:
        """The domain of each node, in order. Raises PlanError where one has no strategy."""
        found: list[Domain] = []
        heads = self._heads() if self.training else [False] * len(self.outline.kinds)
        for position, node in enumerate(self.outline.view.nodes):
            terms = tuple(
                tuple(i for i, v in enumerate(node.inputs) if self._may_be_terms(found, v, axis))
                for axis in range(len(self.sizes))
            )
            given = tuple(tuple(self.offers[a][position]) for a in self.offers)
            reached = self._reached(node) if heads[position] else 0
            key = (self.outline.kinds[position], terms, heads[position], reached, given)
            if key not in self.known:
                self.known[key] = self._domain(position, terms, heads[position])
            found.append(self.known[key])
        return found

    @property
    def _axes(self) -> range:
        return range(len(self.sizes))

    def _may_be_terms(self, found: Sequence[Domain], value_id: int, axis: int) -> bool:
        maker = self.outline.makers.get(value_id)
        return maker is not None and axis in found[maker].partial

    def _reached(self, node: IRNode) -> tuple[int, ...]:
        """Which outputs have a gradient."""
        outline = self.outline
        return tuple(
            index
            for index, value_id in enumerate(node.outputs)
            if value_id in outline.losses
            or any(outline.has_gradient[user] for user, _ in outline.readers.get(value_id, ()))
        )

    def _heads(self) -> list[bool]:
        """Whether few values with a gradient come before each node."""
        if self.head >= len(self.outline.kinds):
            return list(self.outline.has_gradient)
        before: dict[int, frozenset[int] | None] = {}
        found = []
        for position, node in enumerate(self.outline.view.nodes):
            sources = [v for v in node.inputs if v in self.outline.required]
            reached: frozenset[int] | None = frozenset()
            for value_id in sources:
                made = before.get(value_id, frozenset())
                reached = None if made is None or reached is None else reached | made
            if reached is not None:
                reached |= {v for v in sources if v in self.outline.makers}
            if reached is not None and len(reached) > self.head:
                reached = None
            before |= dict.fromkeys(node.outputs, reached)
            found.append(reached is not None and self.outline.has_gradient[position])
        return found

    # --- one domain ---------------------------------------------------------------------------

    def _domain(self, position: int, terms: Sequence[Sequence[int]], is_head: bool) -> Domain:
        node = self.outline.view.nodes[position]
        options = [self._options(position, axis, terms[axis]) for axis in self._axes]
        made = {
            _lies(found): found
            for found in sorted(
                self._variants(position, options, is_head), key=lambda s: s.part.work
            )
        }
        strategies = tuple(sorted(made.values(), key=lambda s: (-s.part.work, str(s.splits))))
        if not strategies:
            raise PlanError(
                f"{describe_node(node)} cannot be done with the splits that are fixed for it; "
                "leave the axis free, or fix other splits"
            )
        partial = frozenset(
            axis
            for axis in self._axes
            if any(made[axis] == Partial() for found in strategies for made in found.makes)
        )
        seconds = np.array([self._seconds(node, found) for found in strategies])
        single = len(self._reached(node)) <= 1
        return Domain(strategies, seconds, partial, single, is_head)

    def _gradients_from_nodes(self, node: IRNode) -> int:
        """How many values with a gradient come in that other nodes make."""
        outline = self.outline
        return sum(v in outline.required and v in outline.makers for v in {*node.inputs})

    def _options(self, position: int, axis: int, terms: Sequence[int]) -> list[Choice]:
        """What an axis may do with a node; terms that are offered may turn out to be none."""
        if axis not in self.offers:
            size = self.sizes[axis]
            return choices(self.outline.bound(position), size, self._lengths(size), terms)
        given = self.offers[axis][position]
        settled = [None] if any(isinstance(choice, Terms) for choice in given) else []
        return list(dict.fromkeys([*given, *settled]))

    def _lengths(self, size: int) -> tuple[int, ...]:
        """Lengths of the graph's dimensions that are not dealt evenly to so many slots."""
        if size not in self.uneven:
            bounds = (bound for bound in self.outline.bounds if bound is not None)
            lengths = {bound.length(name) for bound in bounds for name in bound.identifiers}
            self.uneven[size] = tuple(sorted(n for n in lengths if n >= size and n % size))
        return self.uneven[size]

    def _variants(
        self, position: int, options: Sequence[Sequence[Choice]], is_head: bool
    ) -> Iterator[Strategy]:
        """All strategies of a node, those that its gradients allow."""
        node, bound = self.outline.view.nodes[position], self.outline.bound(position)
        values = self.outline.view.values
        shapes = CallShapes(
            tuple(values[v].shape for v in node.inputs),
            tuple(values[v].shape for v in node.outputs),
        )
        for splits in itertools.product(*options):
            for whole_axes, kept in self._modes(node, splits) if is_head else [_WHOLE_NOWHERE]:
                found = strategy(bound, shapes, self.sizes, splits, whole_axes, kept)
                if found is not None and self._lets_gradients_through(node, found):
                    yield found

    def _modes(
        self, node: IRNode, splits: Sequence[Choice]
    ) -> Iterator[tuple[frozenset[int], frozenset[int]]]:
        """Along which axes all is whole up to a node, and along which of them terms are kept."""
        must = self._gradients_from_nodes(node) == 0
        ways = [
            (("", "w", "k")[must:]) if split is None and self.sizes[axis] > 1 else ("",)
            for axis, split in enumerate(splits)
        ]
        for way in itertools.product(*ways):
            whole_axes = frozenset(axis for axis, mode in enumerate(way) if mode)
            yield whole_axes, frozenset(axis for axis, mode in enumerate(way) if mode == "k")

    def _lets_gradients_through(self, node: IRNode, found: Strategy) -> bool:
        """No gradient goes through terms of a maximum."""
        if not self.training:
            return True
        return not any(
            isinstance(placement, Partial) and placement.op != "sum"
            for value_id, made in zip(node.outputs, found.makes, strict=True)
            if value_id in self.outline.required
            for placement in made
        )

    def _seconds(self, node: IRNode, found: Strategy) -> float:
        """What a strategy takes to compute, forward and, in training, backward."""
        cost = self.costs.node(self.outline.view, node, found.part)
        values = self.outline.view.values
        made = sum(
            volume(whole(largest_shape(placements, self.sizes, values[v].shape)))
            for v, placements in zip(node.outputs, found.makes, strict=True)
        )
        return (cost.total if self.training else cost.forward) + TIE * made


_WHOLE_NOWHERE: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())


def _lies(found: Strategy) -> object:
    """How a strategy's tensors lie: what others see of it."""
    splits = tuple(type(split) if isinstance(split, Terms) else None for split in found.splits)
    return found.reads, found.makes, found.returns, found.whole, found.kept, splits
