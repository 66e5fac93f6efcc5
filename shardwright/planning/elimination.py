"""Variable elimination: the least of a sum of tables over many variables.

Variables go out one after another: all tables that know a variable are added, and the least over
its choices is a new table over its neighbours (Bertelè and Brioschi, 1972; Dechter, 1999). The next
to go is the one whose neighbours have the smallest table, and among those the one that makes the
fewest new neighbours (min-fill).

The result is exact, and the same input gives the same choices. Tables are told apart by identity
and every step is remembered by the tables that go into it: of equal layers, whose tables are the
same objects, the first is computed and the others are looked up. HiGHS finds the same least as an
integer program of these tables, in 2.0 s where elimination takes 4 ms (one Llama layer, 4 × 2).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.errors import PlanError

Table = NDArray[np.float64]
Scope = tuple[int, ...]
"""Variables, ascending."""
Order = Sequence[tuple[int, Scope]]
"""Variables as they go out, each with its neighbours then, ascending."""
FEW = 10
"""Neighbours among which new edges are counted, and up to which prices are kept up to date: a
variable of more goes late."""
LARGEST = 50_000_000
"""Entries that one table may have: 400 MB."""


class CostFactor(NamedTuple):
    """Costs over the choices of some variables, one dimension a variable, in ascending order.

    Infinite where choices exclude each other.
    """

    scope: Scope
    table: Table


@dataclass(eq=False, slots=True)
class EliminationStep:
    """A variable gone: the least over its choices, and the tables it takes its choice from.

    ``tables`` have its choices in their first dimension, then those neighbours whose places among
    all neighbours are given beside them.
    """

    least: Table
    tables: list[tuple[Table, tuple[int, ...]]]
    choices: dict[tuple[int, ...], int] = field(default_factory=dict)
    """What was chosen for choices of the neighbours."""

    @classmethod
    def of(cls, variable: int, near: Scope, factors: Sequence[CostFactor]) -> EliminationStep:
        """The elimination of a variable with these neighbours from the factors' sum."""
        place = {other: i for i, other in enumerate(near)}
        tables = [
            (
                np.moveaxis(factor.table, factor.scope.index(variable), 0),
                tuple(place[v] for v in factor.scope if v != variable),
            )
            for factor in factors
        ]
        return cls(np.asarray(_sum((variable, *near), factors).min(axis=0)), tables)

    def choice(self, neighbours: tuple[int, ...]) -> int:
        """The best choice for choices of the neighbours; the first of equally good ones."""
        if neighbours not in self.choices:
            total = np.zeros(len(self.tables[0][0]))
            for table, places in self.tables:
                at = tuple(neighbours[i] for i in places)
                total += table.transpose(*range(1, table.ndim), 0)[at]
            self.choices[neighbours] = int(total.argmin())
        return self.choices[neighbours]


Steps = dict[object, EliminationStep]
"""By the tables that go into them, which they keep alive, and how these hang together."""


def minimise(
    sizes: Sequence[int],
    factors: Sequence[CostFactor],
    steps: Steps | None = None,
) -> tuple[list[int], float]:
    """The choice of each variable that makes the sum of all factors least, and the sum.

    ``sizes`` are the numbers of choices. Raises PlanError where every choice is excluded, or where
    the variables hang together so closely that a table would be too large (`widest`).
    """
    order = elimination_order(sizes, [factor.scope for factor in factors])
    if widest(sizes, order) > LARGEST:
        raise PlanError(
            "the choices of many nodes hang together, in a table of more than "
            f"{LARGEST} entries; fix the splits of an axis, or use fewer axes"
        )
    gone, least = _eliminate(len(sizes), factors, order, {} if steps is None else steps)
    if math.isinf(least):
        raise PlanError("every choice is excluded by what others choose")
    chosen = [0] * len(sizes)
    for variable, near, step in reversed(gone):
        chosen[variable] = step.choice(tuple(chosen[v] for v in near))
    return chosen, least


def _eliminate(
    count: int, factors: Sequence[CostFactor], order: Order, steps: Steps
) -> tuple[list[tuple[int, Scope, EliminationStep]], float]:
    """The variables that are in some factor, as they go out, and the least sum."""
    live = dict(enumerate(factors))
    touching: list[dict[int, None]] = [{} for _ in range(count)]
    for number, factor in live.items():
        for variable in factor.scope:
            touching[variable][number] = None
    gone, constant, fresh = [], 0.0, len(live)
    for variable, near in order:
        numbers = list(touching[variable])
        if not numbers:
            continue
        removed = [live.pop(number) for number in numbers]
        for number, factor in zip(numbers, removed, strict=True):
            for other in factor.scope:
                del touching[other][number]
        place = {v: i for i, v in enumerate(sorted((*near, variable)))}
        tables = ((id(found.table), *(place[v] for v in found.scope)) for found in removed)
        key = (place[variable], *tables)
        if key not in steps:
            steps[key] = EliminationStep.of(variable, near, removed)
        gone.append((variable, near, steps[key]))
        if not near:
            constant += float(steps[key].least)
            continue
        live[fresh] = CostFactor(near, steps[key].least)
        for other in near:
            touching[other][fresh] = None
        fresh += 1
    return gone, constant


def _sum(scope: Scope, factors: Sequence[CostFactor]) -> Table:
    """The sum of factors with their dimensions in the order of ``scope``, small ones first."""
    total: Table | None = None
    for factor in sorted(factors, key=lambda f: f.table.size):
        order = [v for v in scope if v in factor.scope]
        turned = factor.table.transpose([factor.scope.index(v) for v in order])
        spread = turned[tuple(slice(None) if v in factor.scope else None for v in scope)]
        total = spread if total is None else total + spread
    assert total is not None
    return total


# --- order ----------------------------------------------------------------------------------------


def widest(sizes: Sequence[int], order: Order) -> int:
    """The entries of the largest table that an order makes."""
    tables = (sizes[v] * math.prod(sizes[near] for near in scope) for v, scope in order)
    return max(tables, default=0)


def elimination_order(sizes: Sequence[int], scopes: Iterable[Scope]) -> Order:
    """The order in which variables of factors with these scopes go out."""
    return list(_order(sizes, scopes))


def _order(sizes: Sequence[int], scopes: Iterable[Scope]) -> Iterator[tuple[int, Scope]]:
    """Prices are looked at again when a variable's turn comes."""
    near: list[set[int]] = [set() for _ in sizes]
    for scope in scopes:
        for variable in scope:
            near[variable].update(scope)
    for variable, others in enumerate(near):
        others.discard(variable)
    queue = [(*_price(sizes, near, variable), variable) for variable in range(len(sizes))]
    heapq.heapify(queue)
    done: set[int] = set()
    while queue:
        *known, variable = heapq.heappop(queue)
        if variable in done:
            continue
        price = _price(sizes, near, variable)
        if [*price] > known:
            heapq.heappush(queue, (*price, variable))
            continue
        done.add(variable)
        yield variable, tuple(sorted(near[variable]))
        for other in near[variable]:
            near[other] |= near[variable]
            near[other] -= {other, variable}
        for other in near[variable]:
            if len(near[other]) <= FEW:
                heapq.heappush(queue, (*_price(sizes, near, other), other))


def _price(sizes: Sequence[int], near: Sequence[set[int]], variable: int) -> tuple[int, int]:
    """The entries of the table that eliminating a variable takes, and the edges it adds."""
    others = near[variable]
    entries = sizes[variable] * math.prod([sizes[v] for v in others])
    if not 1 < len(others) <= FEW:
        return entries, 0
    return entries, sum([len(others - near[v]) - 1 for v in others])
