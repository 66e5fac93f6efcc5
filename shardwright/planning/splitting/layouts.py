"""The splits of a graph's nodes that take the least time on a mesh.

Comes in: a forward view, the axes of a mesh, machines, and costs of nodes. Goes out: a
`ChosenSplits`. Every node may be split by any identifier of its dimension annotation along each
axis that is free. What that takes is a sum of tables over the strategies of a node, and of those
that exchange values with it: computing, bringing values to where they are wanted, gradients back,
and those of parameters together once a step (`domains`, `exchange`, `model`). Eliminating one node
after another gives the least sum (`elimination`); equal layers are solved once.

This is the inner problem of Alpa (Zheng et al., OSDI 2022), there an integer program, with what
several readers share counted once.

What always holds: along one free axis no choice has a smaller sum. The sum is what `walk` finds,
but for values of more than four readers, each of which counts as if all asked for the same, and for
a step whose tables would be too wide, where gradients that stay terms count only right behind
parameters. Along several free axes this holds where the tables stay small; else each axis is solved
beside the others in turn, until none gains, and then all together among what the axes chose on the
way (`alternating`). What is given back is always priced by `walk`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from shardwright.clusters import Cluster, Mesh
from shardwright.costs.cost import Costs
from shardwright.errors import PlanError
from shardwright.ir import IRGraph
from shardwright.ops.catalog import why_whole
from shardwright.planning.plan import Split, Terms
from shardwright.planning.splitting.chosen import ChosenSplits, mesh_on, price_splits
from shardwright.planning.splitting.domains import HEAD, Domains, Offers
from shardwright.planning.splitting.elimination import (
    CostFactor,
    Order,
    Table,
    elimination_order,
    minimise,
    widest,
)
from shardwright.planning.splitting.model import Objective, SplitModel
from shardwright.sharding.place import Outline, outline_of
from shardwright.sharding.strategy import Choice, Choices

__all__ = ["ChosenSplits", "best_splits", "price_splits"]

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
) -> ChosenSplits:
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
    search = _LayoutSearch(
        outline_of(view),
        mesh_on(cluster, axes),
        cluster,
        costs,
        Objective(training, byte_price, 1.0 / microbatches),
        {names.index(axis): [[choice] for choice in found] for axis, found in given.items()},
    )
    solved = search.run()
    return price_splits(
        view,
        axes,
        solved.splits,
        cluster=cluster,
        costs=costs,
        training=training,
        microbatches=microbatches,
        reasons=reasons(solved.problem.model, solved.chosen, names),
    )


@dataclass(frozen=True, slots=True)
class _Problem:
    """A model, and the order in which its variables go out."""

    model: SplitModel
    order: Order

    @property
    def is_narrow(self) -> bool:
        """Whether all of its tables are small enough to be solved at once."""
        return widest(self.model.sizes, self.order) <= WIDEST


class _Solved(NamedTuple):
    """Splits, what they cost by the model, and the choices that they are there."""

    splits: list[Choices]
    cost: float
    problem: _Problem
    chosen: list[int]


@dataclass(frozen=True, slots=True)
class _LayoutSearch:
    """A graph on a mesh, and what axes that are not free do."""

    outline: Outline
    mesh: Mesh
    cluster: Cluster
    costs: Costs
    objective: Objective
    fixed: Offers

    def run(self) -> _Solved:
        """The best splits, all free axes at once where their tables are small enough."""
        problem = self.problem({})
        if len(self.free) > 1 and not problem.is_narrow:
            return self.alternating()
        return self.solve(problem, {})

    @property
    def free(self) -> list[int]:
        """The axes that are free and have several slots."""
        sizes = enumerate(self.mesh.sizes)
        return [axis for axis, size in sizes if size > 1 and axis not in self.fixed]

    def problem(self, offers: Offers) -> _Problem:
        """The problem where axes choose among what is offered.

        With one free axis gradients may stay terms as far as they like; where several are free, or
        that makes tables too large, only as far as `HEAD`, or right behind parameters.
        """
        every = {**self.fixed, **offers}
        for head in (len(self.outline.kinds) if len(self.free) == 1 else HEAD, 0):
            found = self._problem(every, head)
            if found.is_narrow:
                break
        return found

    def _problem(self, offers: Offers, head: int) -> _Problem:
        outline, sizes, objective = self.outline, self.mesh.sizes, self.objective
        domains = Domains(outline, sizes, self.costs, objective.training, offers, head).run()
        model = SplitModel(
            outline, domains, sizes, self.cluster.links(self.mesh), objective
        ).build()
        return _Problem(model, elimination_order(model.sizes, [f.scope for f in model.factors]))

    def solve(self, problem: _Problem, offers: Offers) -> _Solved:
        """The best splits of a problem; what is fixed is given back as it is."""
        model = problem.model
        chosen, cost = minimise(model.sizes, model.factors, order=problem.order)
        alone = {
            axis: [choices[0] for choices in found]
            for axis, found in {**self.fixed, **offers}.items()
            if all(len(choices) == 1 for choices in found)
        }
        splits = [
            tuple(
                alone[axis][position] if axis in alone else choice
                for axis, choice in enumerate(domain.strategies[chosen[variable]].splits)
            )
            for position, (domain, variable) in enumerate(
                zip(model.domains, model.nodes, strict=True)
            )
        ]
        return _Solved(splits, cost, problem, chosen)

    def alternating(self) -> _Solved:
        """Each free axis beside the others in turn, from both ends, then all among what they chose.

        An axis that was not solved yet leaves everything whole.
        """
        seen: list[_Solved] = []
        for order in (self.free, self.free[::-1]):
            self._descend(order, seen)
        offers = {
            axis: [
                list(dict.fromkeys(solved.splits[position][axis] for solved in seen))
                for position in range(len(self.outline.kinds))
            ]
            for axis in self.free
        }
        problem = self.problem(offers)
        together = [self.solve(problem, offers)] if problem.is_narrow else []
        return min((*together, *seen), key=lambda solved: solved.cost)

    def _descend(self, order: Sequence[int], seen: list[_Solved]) -> None:
        """Solve axis after axis until none gains; adds what was found to ``seen``."""
        cost = float("inf")
        splits: list[Choices] = [(None,) * self.mesh.ndim] * len(self.outline.kinds)
        for turn in range(ROUNDS * len(order)):
            axis = order[turn % len(order)]
            offers = {
                other: [[found[other]] for found in splits] for other in order if other != axis
            }
            solved = self.solve(self.problem(offers), offers)
            seen.append(solved)
            if turn >= len(order) and solved.cost >= cost * (1 - 1e-9):
                return
            splits, cost = solved.splits, min(cost, solved.cost)


# --- reasons --------------------------------------------------------------------------------------
#
# Values are brought anew where another split asks for other layouts; a node that cannot be split
# says why; of equal nodes between equal neighbours it is worked out once.


def reasons(model: SplitModel, chosen: Sequence[int], axes: Sequence[str]) -> list[str]:
    """A sentence for each node; ``chosen`` is the choice of each variable."""
    return _Reasons(model, chosen, axes).run()


def says(splits: Choices, axes: Sequence[str]) -> str:
    """What the axes of a mesh do with a node, in words."""
    pairs = zip(splits, axes, strict=True)
    return ", ".join(f"{_what(s)} over {axis}" for s, axis in pairs if s is not None) or "whole"


def _what(split: Split | Terms) -> str:
    if isinstance(split, Terms):
        return "terms"
    return split.identifier if split.unit == 1 else f"{split.identifier} by {split.unit}"


@dataclass(slots=True)
class _Reasons:
    model: SplitModel
    chosen: Sequence[int]
    axes: Sequence[str]
    touching: list[list[CostFactor]] = field(init=False)
    joints: frozenset[int] = field(init=False)
    known: dict[object, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.joints = frozenset(variable for variable, _ in self.model.joints.values())
        self.touching = [[] for _ in self.model.sizes]
        for factor in self.model.factors:
            for variable in factor.scope:
                self.touching[variable].append(factor)

    def run(self) -> list[str]:
        outline = self.model.outline
        found = []
        for position, (node, variable) in enumerate(
            zip(outline.view.nodes, self.model.nodes, strict=True)
        ):
            bound = outline.bound(position)
            if bound is None or not bound.identifiers:
                found.append(why_whole(outline.view, node) or "no annotation")
            else:
                found.append(self._reason(position, variable))
        return found

    def _reason(self, position: int, variable: int) -> str:
        joined = dict.fromkeys(
            other
            for factor in self.touching[variable]
            for other in factor.scope
            if other in self.joints
        )
        free = {variable, *joined}
        key = (
            id(self.model.domains[position]),
            self.chosen[variable],
            tuple(
                (id(f.table), *(-1 if v in free else self.chosen[v] for v in f.scope))
                for v in (variable, *joined)
                for f in self.touching[v]
            ),
        )
        if key not in self.known:
            self.known[key] = self._sentence(position, self._alone(variable, set(joined)))
        return self.known[key]

    def _alone(self, variable: int, joined: set[int]) -> Table:
        """Seconds of each strategy of a node where all other nodes stay as they are."""
        direct = [f for f in self.touching[variable] if not joined.intersection(f.scope)]
        total = np.zeros(self.model.sizes[variable])
        for factor in direct:
            total = total + self._slice(factor, [variable])
        for joint in joined:
            table = np.zeros((self.model.sizes[variable], self.model.sizes[joint]))
            for factor in self.touching[joint]:
                if variable in factor.scope:
                    both = self._slice(factor, [variable, joint])
                    table = table + (both if variable < joint else both.T)
                else:
                    table = table + self._slice(factor, [joint])[None, :]
            total = total + table.min(axis=1)
        return total

    def _slice(self, factor: CostFactor, free: Sequence[int]) -> Table:
        """A table where all but some variables stay as they are."""
        at = tuple(slice(None) if v in free else self.chosen[v] for v in factor.scope)
        found: Table = factor.table[at]
        return found

    def _sentence(self, position: int, seconds: Table) -> str:
        domain = self.model.domains[position]
        own = domain.strategies[self.chosen[self.model.nodes[position]]].splits
        least: dict[Choices, float] = {}
        for found, spent in zip(domain.strategies, seconds.tolist(), strict=True):
            least[found.splits] = min(spent, least.get(found.splits, np.inf))
        others = {s: spent for s, spent in least.items() if s != own and np.isfinite(spent)}
        said = f"{says(own, self.axes)}: {_micro(least[own])}"
        if not others:
            return f"{said}; it cannot be split otherwise here"
        other = min(others, key=lambda splits: others[splits])
        return f"{said}; next best {says(other, self.axes)}: {_micro(others[other])}"


def _micro(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} µs"
