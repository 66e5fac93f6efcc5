"""A graph's splits as a sum of tables over the strategies of its nodes.

A `NodeDomain` has the strategies of a node, and what each takes to compute. Values have tables with
their makers and readers, of what it takes to bring them, and their gradients back (`split_costs`).
With one or two readers a value has one table, which is exact; of more readers each pays its share,
as if all asked for the same, which equal layers do. Each gradient is brought to where its value was
made, although `building` may keep terms of one down to the parameters.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np

from shardwright.clusters import Links
from shardwright.costs.cost import Costs
from shardwright.errors import PlanError
from shardwright.ir import IRNode
from shardwright.ir.execute import describe_node
from shardwright.ir.tensor_meta import itemsize
from shardwright.ops.bound import BoundDimop
from shardwright.planning.elimination import CostFactor
from shardwright.planning.split_costs import (
    PricedTensor,
    ReadLayouts,
    Reads,
    Table,
    exchange_table,
    layouts_of,
    prices,
    weight_table,
)
from shardwright.sharding import Partial
from shardwright.sharding.layout import largest_shape
from shardwright.sharding.place import Outline
from shardwright.sharding.strategy import (
    CallShapes,
    Choice,
    Sizes,
    Split,
    Strategy,
    Terms,
    strategy,
)

T = TypeVar("T")
TIE = 1e-17
"""Seconds a byte that a slot makes: of strategies that take as long, the one that makes less."""

Fixed = Mapping[int, Sequence[Choice]]
"""By axis number: what an axis that is not free does with each node."""


@dataclass(frozen=True, slots=True)
class SplitObjective:
    """What counts: whether the backward does too, and how much a second once a step."""

    costs: Costs
    training: bool
    once: float


# --- nodes and their strategies -------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class NodeDomain:
    """Strategies, and the seconds that each takes to compute, a tie-breaker included.

    Nodes of one kind that may read the same terms of sums share one domain object, so that equal
    layers give equal tables.
    """

    strategies: tuple[Strategy, ...]
    seconds: Table
    partial: frozenset[int]
    """Axes along which some strategy makes terms of a sum."""


def node_domains(
    outline: Outline, sizes: Sizes, objective: SplitObjective, fixed: Fixed
) -> list[NodeDomain]:
    """The domain of each node, in order. Raises PlanError where one has no strategy."""
    return _DomainMaker(outline, sizes, objective, fixed).run()


@dataclass(slots=True)
class _DomainMaker:
    """Makes domains, each once; ``run`` gives that of each node.

    Of strategies with equal layouts the cheapest is left.
    """

    outline: Outline
    sizes: Sizes
    objective: SplitObjective
    fixed: Fixed
    uneven: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By size of an axis: lengths that come out uneven along it."""

    def run(self) -> list[NodeDomain]:
        """The domain of each node, in order."""
        found: list[NodeDomain] = []
        known: dict[object, NodeDomain] = {}
        for position, node in enumerate(self.outline.view.nodes):
            terms = tuple(
                tuple(i for i, v in enumerate(node.inputs) if self._may_be_partial(found, v, axis))
                for axis in range(len(self.sizes))
            )
            given = tuple(found[position] for found in self.fixed.values())
            key = (self.outline.kinds[position], terms, given)
            if key not in known:
                known[key] = self._domain(position, terms)
            found.append(known[key])
        return found

    def _may_be_partial(self, found: Sequence[NodeDomain], value_id: int, axis: int) -> bool:
        maker = self.outline.makers.get(value_id)
        return maker is not None and axis in found[maker].partial

    def _domain(self, position: int, terms: Sequence[Sequence[int]]) -> NodeDomain:
        node = self.outline.view.nodes[position]
        options = [self._options(position, axis, at) for axis, at in enumerate(terms)]
        variants = sorted(self._variants(position, options), key=lambda s: s.part.work)
        distinct = {_tensor_layouts(found): found for found in variants}
        strategies = sorted(distinct.values(), key=lambda s: (-s.part.work, str(s.splits)))
        if not strategies:
            raise PlanError(
                f"{describe_node(node)} cannot be done with the splits that are fixed for it; "
                "leave the axis free, or fix other splits"
            )
        partial = frozenset(
            axis
            for found in strategies
            for made in found.makes
            for axis, placement in enumerate(made)
            if placement == Partial()
        )
        seconds = np.array([self._seconds(node, found) for found in strategies])
        return NodeDomain(tuple(strategies), seconds, partial)

    def _options(self, position: int, axis: int, terms: Sequence[int]) -> list[Choice]:
        """What an axis may do with a node; terms that are fixed may turn out to be none."""
        if axis not in self.fixed:
            size = self.sizes[axis]
            return choices(self.outline.bound(position), size, self._lengths(size), terms)
        given = self.fixed[axis][position]
        return [given, None] if isinstance(given, Terms) else [given]

    def _lengths(self, size: int) -> tuple[int, ...]:
        """Lengths of the graph's dimensions that are not dealt evenly to so many slots."""
        if size not in self.uneven:
            bounds = (bound for bound in self.outline.bounds if bound is not None)
            lengths = {bound.length(name) for bound in bounds for name in bound.identifiers}
            self.uneven[size] = tuple(sorted(n for n in lengths if n >= size and n % size))
        return self.uneven[size]

    def _variants(self, position: int, options: Sequence[Sequence[Choice]]) -> Iterator[Strategy]:
        """All strategies of a node; no gradient goes through terms of a maximum."""
        node, values = self.outline.view.nodes[position], self.outline.view.values
        inputs, outputs = (
            tuple(values[v].shape for v in found) for found in (node.inputs, node.outputs)
        )
        for splits in itertools.product(*options):
            bound = self.outline.bound(position)
            found = strategy(bound, CallShapes(inputs, outputs), self.sizes, splits)
            if found is not None and not self._blocks_gradients(node, found):
                yield found

    def _blocks_gradients(self, node: IRNode, found: Strategy) -> bool:
        return self.objective.training and any(
            isinstance(placement, Partial) and placement.op != "sum"
            for value_id, made in zip(node.outputs, found.makes, strict=True)
            if value_id in self.outline.required
            for placement in made
        )

    def _seconds(self, node: IRNode, found: Strategy) -> float:
        """What a strategy takes to compute, forward and, in training, backward."""
        cost = self.objective.costs.node(self.outline.view, node, found.part)
        values = self.outline.view.values
        made = sum(
            math.prod(largest_shape(placements, self.sizes, values[v].shape))
            for v, placements in zip(node.outputs, found.makes, strict=True)
        )
        return (cost.total if self.objective.training else cost.forward) + TIE * made


def choices(
    bound: BoundDimop | None, size: int, lengths: Collection[int], terms: Collection[int]
) -> list[Choice]:
    """What an axis of ``size`` slots may do with a call: leave it whole, split it, keep terms.

    ``lengths`` are those that the graph's other calls are cut at, where they do not come out even:
    columns that are ten heads may have to be cut at heads. ``terms`` are the inputs that may come
    as terms of a sum.
    """
    found: list[Choice] = [None]
    if bound is None or size == 1:
        return found
    for identifier in bound.identifiers:
        length = bound.length(identifier)
        found += [Split(identifier, unit) for unit in _units(length, size, lengths)]
    if len(bound.call.outputs) == 1:
        found += [Terms(inputs) for inputs in bound.linear if set(inputs) <= set(terms)]
    return found


def _units(length: int, size: int, lengths: Collection[int]) -> Iterator[int]:
    """Units at whose multiples a length may be cut for ``size`` slots, so that cuts differ."""
    if length >= size:
        yield 1
    for units in lengths:
        if size <= units < length and units % size and length % units == 0:
            yield length // units


def _tensor_layouts(found: Strategy) -> object:
    """The layouts of a strategy's tensors: what others see of it."""
    splits = tuple(type(split) if isinstance(split, Terms) else None for split in found.splits)
    return found.reads, found.makes, found.returns, splits


# --- the problem ----------------------------------------------------------------------------------


class _ValueRead(NamedTuple):
    """A read of a value: by which domain, as which input, and whether a gradient comes back."""

    domain: NodeDomain
    number: int
    has_gradient: bool

    def layouts(self) -> list[ReadLayouts | None]:
        """How each strategy reads it; None where only the dtype is read."""
        found: list[ReadLayouts | None] = []
        for chosen in self.domain.strategies:
            read, back = chosen.reads[self.number], chosen.returns[self.number]
            found.append(
                None if read is None else ReadLayouts(read, back if self.has_gradient else None)
            )
        return found


class _ProducedValue(NamedTuple):
    """A value that a node makes: by which domain, as which output, and what leaving counts for."""

    domain: NodeDomain
    number: int
    leaves: float


class _ValueTable(NamedTuple):
    """What makes or stores a value, and one or two reads of it."""

    tensor: PricedTensor
    source: _ProducedValue | float
    """A stored value's is what a second once a step counts for."""
    reads: tuple[_ValueRead, ...]

    def table(self) -> Table:
        """Seconds by the strategies of the maker, where a node makes it, and of the readers."""
        kinds, columns = [], []
        for read in self.reads:
            found, column = _distinct(read.layouts())
            kinds.append(found)
            columns.append(column)
        first: Reads = kinds[0] if kinds else (None,)
        second: Reads = kinds[1] if len(kinds) > 1 else (None,)
        if not isinstance(self.source, _ProducedValue):
            between = prices(self.tensor, layouts_of((), (*first, *second)))
            table = weight_table(between, self.source, first, second)
        else:
            number = self.source.number
            layouts = [found.makes[number] for found in self.source.domain.strategies]
            made, column = _distinct(layouts)
            columns.insert(0, column)
            between = prices(self.tensor, layouts_of(made, (*first, *second)))
            table = exchange_table(between, made, self.source.leaves, first, second)
        table = table.reshape(table.shape[: len(columns)])
        return np.ascontiguousarray(table[np.ix_(*columns)]) if columns else table


def _distinct(items: Sequence[T]) -> tuple[list[T], list[int]]:
    """The distinct items, and the number of each item among them."""
    numbers: dict[T, int] = {}
    column = [numbers.setdefault(item, len(numbers)) for item in items]
    return list(numbers), column


@dataclass(slots=True)
class SplitProblem:
    """A variable a node, whose choices are its domain's strategies, and factors.

    Equal tables are one object, so that equal layers are eliminated once.
    """

    outline: Outline
    domains: Sequence[NodeDomain]
    mesh_sizes: Sizes
    links: tuple[Links, ...]
    objective: SplitObjective
    factors: list[CostFactor] = field(default_factory=list)
    tables: dict[object, Table] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for position, domain in enumerate(self.domains):
            self.factors.append(CostFactor((position,), domain.seconds))
        for value_id in (*(v.id for v in self.outline.view.stored()), *self.outline.makers):
            self._add_value(value_id)

    @property
    def sizes(self) -> list[int]:
        """How many choices each variable has."""
        return [len(domain.strategies) for domain in self.domains]

    def _add_value(self, value_id: int) -> None:
        """The factors of one value: one of all its reads, or of many reads one each."""
        value = self.outline.view.values[value_id]
        tensor = PricedTensor(value.shape, itemsize(value.dtype), self.mesh_sizes, self.links)
        maker, source = self.outline.makers.get(value_id), self._source(value_id)
        reads = self._reads(value_id)
        makers = [] if maker is None else [maker]
        groups = [reads] if len(reads) <= 2 else [[read] for read in reads]
        for group in groups:
            found = tuple(_ValueRead(self.domains[at], number, back) for at, number, back in group)
            scope = [*makers, *(at for at, *_ in group)]
            self._add_factor(scope, _ValueTable(tensor, source, found), len(groups))

    def _add_factor(self, scope: list[int], use: _ValueTable, shares: int) -> None:
        """A factor; where a variable stands twice in it, both choices are the same."""
        distinct = sorted(set(scope))
        places = tuple(distinct.index(variable) for variable in scope)
        key = use, shares, places
        if key not in self.tables:
            letters = "".join(chr(ord("a") + place) for place in places)
            table = np.einsum(f"{letters}->{''.join(sorted(set(letters)))}", use.table())
            self.tables[key] = np.ascontiguousarray(table) / shares
        if self.tables[key].any():
            self.factors.append(CostFactor(tuple(distinct), self.tables[key]))

    def _reads(self, value_id: int) -> list[tuple[int, int, bool]]:
        """Who reads a value, as which input, and whether a gradient comes back.

        What replaces a stored value is wanted where that is read.
        """
        outline = self.outline
        returns = self.objective.training and value_id in outline.required
        found = [
            (position, index, returns and outline.has_gradient[position])
            for position, index in outline.readers.get(value_id, ())
        ]
        for old, new in outline.view.updates.items():
            if new == value_id and old in outline.readers:
                found.append((*outline.readers[old][0], False))
        return found

    def _source(self, value_id: int) -> _ProducedValue | float:
        """How a value comes to be; results leave the graph, numbers of a step once for all."""
        maker, view, objective = (
            self.outline.makers.get(value_id),
            self.outline.view,
            self.objective,
        )
        if maker is None:
            is_trained = objective.training and value_id in self.outline.trained
            return objective.once if is_trained else 0.0
        once = objective.training and not view.values[value_id].shape
        leaves = (objective.once if once else 1.0) if value_id in view.outputs else 0.0
        number = view.nodes[maker].outputs.index(value_id)
        return _ProducedValue(self.domains[maker], number, leaves)
