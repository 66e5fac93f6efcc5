"""The splits of a graph's nodes that take the least time on a mesh.

Comes in: a forward view, the axes of a mesh, machines, and costs of nodes. Goes out: a `Chosen`.
Every node may be split by any identifier of its dimension annotation along each axis that is free.
What that takes is a sum of tables over the strategies of a node, and of those that exchange values
with it: computing, bringing values to where they are wanted, gradients back, and those of
parameters together once a step (`domains`, `exchange`, `model`). Eliminating one node after another
gives the least sum (`elimination`); equal layers are solved once.

This is the inner problem of Alpa (Zheng et al., OSDI 2022), there an integer program, with what
several readers share counted once.

What always holds: along one free axis the choice is the best there is. Along several it is, where
the tables stay small; else each axis is solved exactly beside the others in turn, until none gains,
and then all together among what the axes chose on the way (`alternating`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwright.errors import PlanError
from shardwright.ir import IRGraph
from shardwright.layout import Cluster, Mesh
from shardwright.planning.chosen import Chosen, mesh_on, price_splits
from shardwright.planning.domains import HEAD, Domains, Offers
from shardwright.planning.elimination import minimise, widest
from shardwright.planning.model import Model, Terms
from shardwright.planning.outline import Outline, outline_of
from shardwright.planning.strategies import Choice, Choices
from shardwright.profiling.cost import Costs

__all__ = ["Chosen", "best_splits", "price_splits"]

WIDEST = 3_000_000
"""Entries that a table may have for several free axes to be solved at once."""
ROUNDS = 6
"""How often each axis is solved beside the others, at most."""


def best_splits(
    view: IRGraph,
    axes: Mapping[str, int],
    *,
    cluster: Cluster,
    costs: Costs,
    training: bool,
    fixed: Mapping[str, Sequence[Choice]] | None = None,
    byte_price: float = 0.0,
    microbatches: int = 1,
) -> Chosen:
    """The splits of least seconds for the nodes of a forward view.

    view
        The forward of a model, or of a training step (`forward_view`).
    axes
        The sizes of a mesh's axes by name, the outermost first, without a pipeline. It stands on
        the first slots of ``cluster``.
    fixed
        By axis: what an axis that is not free does with each node, such as a batch's split.
    byte_price
        Seconds that a byte of stored values on a slot is worth.
    microbatches
        How many share what is done once a step.

    Raises PlanError where the cluster is too small, or fixed splits cannot be.
    """
    given = dict(fixed or {})
    if unknown := [axis for axis in given if axis not in axes]:
        raise PlanError(
            f"the axis {unknown[0]!r} is fixed, but the mesh has only {', '.join(axes) or 'none'}"
        )
    names = list(axes)
    search = _Search(
        outline_of(view),
        mesh_on(cluster, axes),
        cluster,
        costs,
        Terms(training, byte_price, 1.0 / microbatches),
        {names.index(axis): [[choice] for choice in found] for axis, found in given.items()},
    )
    splits = search.run()
    return price_splits(
        view,
        axes,
        splits,
        cluster=cluster,
        costs=costs,
        training=training,
        microbatches=microbatches,
    )


@dataclass(frozen=True, slots=True)
class _Search:
    """A graph on a mesh, and what axes that are not free do."""

    outline: Outline
    mesh: Mesh
    cluster: Cluster
    costs: Costs
    terms: Terms
    fixed: Offers

    def run(self) -> list[Choices]:
        """The best splits, all free axes at once where their tables are small enough."""
        model = self.model({})
        if len(self.free) > 1 and self._width(model) > WIDEST:
            return self.alternating()
        return self.solve(model, {})[0]

    @property
    def free(self) -> list[int]:
        """The axes that are free and have several slots."""
        sizes = enumerate(self.mesh.sizes)
        return [axis for axis, size in sizes if size > 1 and axis not in self.fixed]

    def model(self, offers: Offers) -> Model:
        """The problem where axes choose among what is offered.

        With one free axis gradients may stay terms as far as they like; where several are free, or
        that makes tables too large, only as far as `HEAD`, or right behind parameters.
        """
        for head in (len(self.outline.kinds) if len(self.free) == 1 else HEAD, 0):
            model = self._model(offers, head)
            if self._width(model) <= WIDEST:
                break
        return model

    def _model(self, offers: Offers, head: int) -> Model:
        outline, sizes, terms = self.outline, self.mesh.sizes, self.terms
        every = {**self.fixed, **offers}
        domains = Domains(outline, sizes, self.costs, terms.training, every, head).run()
        links = self.cluster.links(self.mesh)
        return Model(outline, domains, sizes, links, terms).build()

    def _width(self, model: Model) -> int:
        return widest(model.sizes, [factor.scope for factor in model.factors])

    def solve(self, model: Model, offers: Offers) -> tuple[list[Choices], float]:
        """The best splits of a problem, and their cost; what is fixed is given back as it is."""
        chosen, cost = minimise(model.sizes, model.factors)
        alone = {
            axis: [choices[0] for choices in found]
            for axis, found in {**self.fixed, **offers}.items()
            if all(len(choices) == 1 for choices in found)
        }
        return [
            tuple(
                alone[axis][position] if axis in alone else choice
                for axis, choice in enumerate(domain.strategies[chosen[variable]].splits)
            )
            for position, (domain, variable) in enumerate(
                zip(model.domains, model.nodes, strict=True)
            )
        ], cost

    def alternating(self) -> list[Choices]:
        """Each free axis beside the others in turn, from both ends, then all among what they chose.

        An axis that was not solved yet leaves everything whole.
        """
        seen: list[list[Choices]] = []
        found = [self._descend(order, seen) for order in (self.free, self.free[::-1])]
        splits, cost = min(found, key=lambda entry: entry[1])
        offers = {
            axis: [list(dict.fromkeys(s[i][axis] for s in seen)) for i in range(len(splits))]
            for axis in self.free
        }
        model = self.model(offers)
        if self._width(model) <= WIDEST:
            together, least = self.solve(model, offers)
            splits = together if least < cost else splits
        return splits

    def _descend(
        self, order: Sequence[int], seen: list[list[Choices]]
    ) -> tuple[list[Choices], float]:
        """Solve axis after axis until none gains; adds what was chosen to ``seen``."""
        count, cost = len(self.outline.kinds), float("inf")
        splits: list[Choices] = [(None,) * self.mesh.ndim] * count
        for turn in range(ROUNDS * len(order)):
            axis = order[turn % len(order)]
            offers = {
                other: [[found[other]] for found in splits] for other in order if other != axis
            }
            splits, least = self.solve(self.model(offers), offers)
            seen.append(splits)
            if turn >= len(order) and least >= cost * (1 - 1e-9):
                break
            cost = min(cost, least)
        return splits, cost
