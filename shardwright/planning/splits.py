"""The splits of a graph's nodes that take the least time on a mesh.

Every node may be split by any identifier of its dimension annotation along each axis that is free.
What that takes is a sum of tables (`split_problem`); eliminating one node after another gives the
least (`elimination`). This is the inner problem of Alpa (Zheng et al., OSDI 2022), there an integer
program.

Along one free axis no choice has a smaller sum, and along several where the tables stay small; else
each axis is solved with the others fixed in turn, until none gains, and then all together among
what the axes chose on the way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardwright.clusters import Cluster, Links, Mesh
from shardwright.costs.cost import Costs
from shardwright.errors import PlanError
from shardwright.ir import IRGraph
from shardwright.ops.catalog import why_whole
from shardwright.planning.elimination import CostFactor, minimise
from shardwright.planning.split_costs import Table
from shardwright.planning.split_problem import (
    NodeDomain,
    Offers,
    SplitObjective,
    SplitProblem,
    node_domains,
)
from shardwright.sharding.place import Outline, outline_of
from shardwright.sharding.strategy import Choice, Choices, Split, Terms

ROUNDS = 6
"""How often each axis is solved with the others fixed, at most."""


class BestSplits(NamedTuple):
    """What each axis of a mesh does with each node, what that takes, and why, in words.

    ``seconds`` are those of a microbatch, with its share of what is done once a step, and what
    stored bytes are worth.
    """

    splits: list[Choices]
    seconds: float
    reasons: list[str]


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
) -> BestSplits:
    """The splits of least seconds for the nodes of a forward view.

    view
        The forward of a model, or of a training step (`forward_view`).
    axes
        The sizes of a mesh's axes by name, the outermost first, without a pipeline. It stands on
        the first slots of ``cluster``.
    fixed
        By axis: what an axis that is not free does with each node, such as a batch's split. Where
        all are fixed, this says what they take.
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
    offers = {names.index(axis): [[choice] for choice in found] for axis, found in given.items()}
    objective = SplitObjective(costs, training, byte_price, 1.0 / microbatches)
    mesh = mesh_on(cluster, axes)
    search = _SplitSearch(outline_of(view), mesh, cluster.links(mesh), objective, offers)
    solved = search.run()
    return BestSplits(solved.splits, solved.seconds, reasons(solved.problem, solved.chosen, names))


def mesh_on(cluster: Cluster, axes: Mapping[str, int]) -> Mesh:
    """The mesh with these axes on the first slots of a cluster. Raises PlanError."""
    needed = math.prod(axes.values())
    if needed > len(cluster.devices):
        raise PlanError(
            f"a mesh of {' × '.join(f'{axis} {size}' for axis, size in axes.items())} needs "
            f"{needed} slots, but the cluster has {len(cluster.devices)}"
        )
    return Mesh.of(axes, cluster.devices[:needed])


# --- the search -----------------------------------------------------------------------------------


class _Solved(NamedTuple):
    """Splits, the problem whose least they are, what they take there, and the choices."""

    splits: list[Choices]
    problem: SplitProblem
    seconds: float
    chosen: list[int]


@dataclass(frozen=True, slots=True)
class _SplitSearch:
    """A graph on a mesh, and what axes that are not free do."""

    outline: Outline
    mesh: Mesh
    links: tuple[Links, ...]
    objective: SplitObjective
    fixed: Offers

    def run(self) -> _Solved:
        """The best splits, all free axes at once where their tables are small enough."""
        problem = self.problem({})
        if len(self.free) > 1 and not problem.is_narrow:
            return self.alternate()
        return self.solve(problem, {})

    @property
    def free(self) -> list[int]:
        """The axes that are free and have several slots."""
        sizes = enumerate(self.mesh.sizes)
        return [axis for axis, size in sizes if size > 1 and axis not in self.fixed]

    def problem(self, offers: Offers) -> SplitProblem:
        """The problem where axes choose among what is offered."""
        sizes, every = self.mesh.sizes, {**self.fixed, **offers}
        domains = node_domains(self.outline, sizes, self.objective, every)
        return SplitProblem(self.outline, domains, sizes, self.links, self.objective)

    def solve(self, problem: SplitProblem, offers: Offers) -> _Solved:
        """The best splits of a problem; what is fixed is given back as it is."""
        chosen, seconds = minimise(problem.sizes, problem.factors, problem.order)
        every = {**self.fixed, **offers}
        splits = []
        for position, (domain, number) in enumerate(zip(problem.domains, chosen, strict=True)):
            found = list(domain.strategies[number].splits)
            for axis, offered in every.items():
                if len(offered[position]) == 1:
                    (found[axis],) = offered[position]
            splits.append(tuple(found))
        return _Solved(splits, problem, seconds, chosen)

    def alternate(self) -> _Solved:
        """Each free axis with the others fixed in turn, from both ends, then all among these.

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
        return min((*together, *seen), key=lambda solved: solved.seconds)

    def _descend(self, order: Sequence[int], seen: list[_Solved]) -> None:
        """Solve axis after axis until none gains; adds what was found to ``seen``."""
        least = float("inf")
        splits: list[Choices] = [(None,) * self.mesh.ndim] * len(self.outline.kinds)
        for turn in range(ROUNDS * len(order)):
            axis = order[turn % len(order)]
            offers = {
                other: [[found[other]] for found in splits] for other in order if other != axis
            }
            solved = self.solve(self.problem(offers), offers)
            seen.append(solved)
            if turn >= len(order) and solved.seconds >= least * (1 - 1e-9):
                return
            splits, least = solved.splits, min(least, solved.seconds)


# --- reasons --------------------------------------------------------------------------------------


def reasons(problem: SplitProblem, chosen: Sequence[int], axes: Sequence[str]) -> list[str]:
    """A sentence for each node: what its split takes, and the next best, all others left as is.

    A node that cannot be split says why. Of equal nodes between equal neighbours it is worked out
    once.
    """
    touching: list[list[CostFactor]] = [[] for _ in problem.domains]
    for factor in problem.factors:
        for variable in factor.scope:
            touching[variable].append(factor)
    known: dict[object, str] = {}
    found = []
    for position, node in enumerate(problem.outline.view.nodes):
        bound = problem.outline.bound(position)
        if bound is None or not bound.identifiers:
            found.append(why_whole(problem.outline.view, node) or "no annotation")
            continue
        around = tuple(
            (id(f.table), tuple(-1 if v == position else chosen[v] for v in f.scope))
            for f in touching[position]
        )
        key = chosen[position], around
        if key not in known:
            seconds = np.zeros(len(problem.domains[position].strategies))
            for factor in touching[position]:
                at = (slice(None) if v == position else chosen[v] for v in factor.scope)
                seconds = seconds + factor.table[tuple(at)]
            known[key] = _reason(problem.domains[position], chosen[position], seconds, axes)
        found.append(known[key])
    return found


def _reason(domain: NodeDomain, chosen: int, seconds: Table, axes: Sequence[str]) -> str:
    own = domain.strategies[chosen].splits
    least: dict[Choices, float] = {}
    for found, spent in zip(domain.strategies, seconds.tolist(), strict=True):
        least[found.splits] = min(spent, least.get(found.splits, math.inf))
    others = {s: spent for s, spent in least.items() if s != own and math.isfinite(spent)}
    said = f"{says(own, axes)}: {_micro(least[own])}"
    if not others:
        return f"{said}; it cannot be split otherwise here"
    other = min(others, key=lambda splits: others[splits])
    return f"{said}; next best {says(other, axes)}: {_micro(others[other])}"


def says(splits: Choices, axes: Sequence[str]) -> str:
    """What the axes of a mesh do with a node, in words."""
    pairs = zip(splits, axes, strict=True)
    return ", ".join(f"{_what(s)} over {axis}" for s, axis in pairs if s is not None) or "whole"


def _what(split: Split | Terms) -> str:
    if isinstance(split, Terms):
        return "terms"
    return split.identifier if split.unit == 1 else f"{split.identifier} by {split.unit}"


def _micro(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} µs"
