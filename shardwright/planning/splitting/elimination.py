"""The cheapest choice for many variables whose costs are sums of tables: variable elimination.

Comes in: how many choices each variable has, and factors: each a table of costs over the choices of
a few variables, infinite where they exclude each other. Goes out: the choices of least total cost,
and that cost. Variables go out one after another: all tables that know a variable are added, and
the least over its choices is a new table over its neighbours (Bertelè and Brioschi, 1972; Dechter,
1999). The next to go is the one whose neighbours have the smallest table, and among those the one
that makes the fewest new neighbours (min-fill).

What always holds: the result is exact; the same input gives the same choices. Tables are told apart
by identity and every step is remembered by the tables that go into it: of equal layers, whose
tables are the same objects, the first is computed and the others are looked up.
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
FEW = 10
"""Neighbours among which new edges are counted, and up to which prices are kept up to date: a
variable of more goes late."""
LARGEST = 50_000_000
"""Entries that one table may have: 400 MB."""


class CostFactor(NamedTuple):
    """Costs over the choices of some variables, one dimension a variable, in ascending order."""

    scope: Scope
    table: Table


class EliminationStep(NamedTuple):
    """A variable gone: the least over its choices, and the tables it takes its choice from.

    ``tables`` have its choices in their first dimension, then those neighbours whose places among
    all neighbours are given beside them.
    """

    least: Table
    tables: tuple[tuple[Table, tuple[int, ...]], ...]

    def choice(self, neighbours: Sequence[int]) -> int:
        """The best choice for choices of the neighbours; the first of equally good ones."""
        total = np.zeros(len(self.tables[0][0]))
        for table, places in self.tables:
            total += table.transpose(*range(1, table.ndim), 0)[tuple(neighbours[i] for i in places)]
        return int(total.argmin())


class _Gone(NamedTuple):
    """A variable that was eliminated, and its neighbours then."""

    variable: int
    scope: Scope
    step: EliminationStep | None


@dataclass(slots=True)
class EliminationMemory:
    """Steps of eliminations, for reuse. It keeps the tables alive whose identity it knows."""

    steps: dict[object, EliminationStep] = field(default_factory=dict)
    choices: dict[object, int] = field(default_factory=dict)
    tables: dict[int, Table] = field(default_factory=dict)

    def step(self, variable: int, scope: Scope, factors: Sequence[CostFactor]) -> EliminationStep:
        """The elimination of a variable from the factors' sum, whose variables are ``scope``."""
        place = {v: i for i, v in enumerate(scope)}
        key = (
            place[variable],
            *((id(f.table), *(place[v] for v in f.scope)) for f in factors),
        )
        if key not in self.steps:
            for factor in factors:
                self.tables[id(factor.table)] = factor.table
            self.steps[key] = _step(variable, scope, factors)
        return self.steps[key]

    def choice(self, step: EliminationStep, neighbours: tuple[int, ...]) -> int:
        """As `EliminationStep.choice`."""
        key = (id(step.least), neighbours)
        if key not in self.choices:
            self.choices[key] = step.choice(neighbours)
        return self.choices[key]


def _step(variable: int, scope: Scope, factors: Sequence[CostFactor]) -> EliminationStep:
    total = _sum((variable, *(v for v in scope if v != variable)), factors)
    others = {v: i for i, v in enumerate(v for v in scope if v != variable)}
    tables = (
        (
            np.moveaxis(factor.table, factor.scope.index(variable), 0),
            tuple(others[v] for v in factor.scope if v != variable),
        )
        for factor in factors
    )
    return EliminationStep(np.asarray(total.min(axis=0)), tuple(tables))


Order = Sequence[tuple[int, Scope]]
"""Variables as they go out, each with its neighbours then, ascending."""


def minimise(
    sizes: Sequence[int],
    factors: Sequence[CostFactor],
    memory: EliminationMemory | None = None,
    order: Order | None = None,
) -> tuple[list[int], float]:
    """The choice of each variable that makes the sum of all factors least, and the sum.

    ``sizes`` are the numbers of choices, ``order`` is one that `elimination_order` gave. Raises
    PlanError where every choice is excluded, or where the variables hang together so closely that
    a table would be too large (`widest`).
    """
    if order is None:
        order = elimination_order(sizes, [factor.scope for factor in factors])
    if widest(sizes, order) > LARGEST:
        raise PlanError(
            "the choices of many nodes hang together, in a table of more than "
            f"{LARGEST} entries; fix the splits of an axis, or use fewer axes"
        )
    return _Elimination(sizes, memory or EliminationMemory(), factors).run(order)


def elimination_order(sizes: Sequence[int], scopes: Iterable[Scope]) -> Order:
    """The order in which variables of factors with these scopes go out."""
    return list(_order(sizes, scopes))


def widest(sizes: Sequence[int], order: Order) -> int:
    """The entries of the largest table that an order makes."""
    tables = (sizes[v] * math.prod(sizes[near] for near in scope) for v, scope in order)
    return max(tables, default=0)


class _Elimination:
    """Factors by number, and the factors of each variable."""

    def __init__(
        self, sizes: Sequence[int], memory: EliminationMemory, factors: Iterable[CostFactor]
    ) -> None:
        self.sizes = sizes
        self.memory = memory
        self.constant = 0.0
        self.factors: dict[int, CostFactor] = {}
        self.of: list[dict[int, None]] = [{} for _ in sizes]
        self.numbers = 0
        for factor in factors:
            self.add(factor)

    def add(self, factor: CostFactor) -> None:
        if not factor.scope:
            self.constant += float(factor.table)
            return
        self.factors[self.numbers] = factor
        for variable in factor.scope:
            self.of[variable][self.numbers] = None
        self.numbers += 1

    def run(self, order: Order) -> tuple[list[int], float]:
        gone = [self.eliminate(variable, near) for variable, near in order]
        if math.isinf(self.constant):
            raise PlanError("every choice is excluded by what others choose")
        chosen = [0] * len(self.sizes)
        for variable, near, step in reversed(gone):
            if step is not None:
                at = tuple(chosen[v] for v in near)
                chosen[variable] = self.memory.choice(step, at)
        return chosen, self.constant

    def eliminate(self, variable: int, near: Scope) -> _Gone:
        numbers = list(self.of[variable])
        if not numbers:
            return _Gone(variable, (), None)
        scope = tuple(sorted((*near, variable)))
        step = self.memory.step(variable, scope, [self.factors[n] for n in numbers])
        for number in numbers:
            for other in self.factors.pop(number).scope:
                del self.of[other][number]
        self.add(CostFactor(near, step.least))
        return _Gone(variable, near, step)


def _order(sizes: Sequence[int], scopes: Iterable[Scope]) -> Iterator[tuple[int, Scope]]:
    """Variables as they go out, each with its neighbours then, in ascending order.

    Prices are looked at again when a variable's turn comes.
    """
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
