"""The splits of a graph's nodes that take the least time on a mesh.

Every node may be split by any identifier of its dimension annotation along each axis that is free.
What that takes is a sum of tables (`split_problem`); eliminating one node after another gives the
least (`elimination`). This is the inner problem of Alpa (Zheng et al., OSDI 2022), there an integer
program.

No choice has a smaller sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from shardwright.clusters import Cluster, Mesh
from shardwright.costs.cost import Costs
from shardwright.errors import PlanError
from shardwright.ir import IRGraph
from shardwright.ops.catalog import why_whole
from shardwright.planning.elimination import CostFactor, minimise
from shardwright.planning.plan import split_text
from shardwright.planning.split_costs import Table
from shardwright.planning.split_problem import (
    NodeDomain,
    SplitObjective,
    SplitProblem,
    node_domains,
)
from shardwright.sharding.place import outline_of
from shardwright.sharding.strategy import Choice, Choices


class BestSplits(NamedTuple):
    """What each axis of a mesh does with each node, what that takes, and why, in words.

    ``seconds`` are those of a microbatch, with its share of what is done once a step.
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
    microbatches
        How many share what is done once a step.

    Raises PlanError where the cluster is too small, or fixed splits cannot be.
    """
    given = dict(fixed or {})
    if unknown := [axis for axis in given if axis not in axes]:
        raise PlanError(
            f"the axis {unknown[0]!r} is fixed, but the mesh has only {', '.join(axes) or 'none'}"
        )
    names, mesh = list(axes), mesh_on(cluster, axes)
    numbered = {names.index(axis): found for axis, found in given.items()}
    objective = SplitObjective(costs, training, 1.0 / microbatches)
    outline = outline_of(view)
    domains = node_domains(outline, mesh.sizes, objective, numbered)
    problem = SplitProblem(outline, domains, mesh.sizes, cluster.links(mesh), objective)
    chosen, seconds = minimise(problem.sizes, problem.factors)
    splits = [domain.strategies[at].splits for domain, at in zip(domains, chosen, strict=True)]
    for axis, found in numbered.items():
        splits = [(*s[:axis], own, *s[axis + 1 :]) for s, own in zip(splits, found, strict=True)]
    return BestSplits(splits, seconds, reasons(problem, chosen, names))


def mesh_on(cluster: Cluster, axes: Mapping[str, int]) -> Mesh:
    """The mesh with these axes on the first slots of a cluster. Raises PlanError."""
    needed = math.prod(axes.values())
    if needed > len(cluster.devices):
        raise PlanError(
            f"a mesh of {' × '.join(f'{axis} {size}' for axis, size in axes.items())} needs "
            f"{needed} slots, but the cluster has {len(cluster.devices)}"
        )
    return Mesh.of(axes, cluster.devices[:needed])


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
    said = f"{split_text(axes, own)}: {_micro(least[own])}"
    if not others:
        return f"{said}; it cannot be split otherwise here"
    other = min(others, key=lambda splits: others[splits])
    return f"{said}; next best {split_text(axes, other)}: {_micro(others[other])}"


def _micro(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} µs"
