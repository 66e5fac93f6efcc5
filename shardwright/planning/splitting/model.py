"""A graph's splits as one problem for `elimination`: variables, and tables of seconds.

Comes in: an outline, a domain for each node, the links of a mesh. Goes out: a `SplitModel`, whose
variables are the nodes' strategies and, for values that three or four nodes read, the layouts that
these are brought to. What always holds: the sum of all tables at a choice is what `walk` finds for
it, as far as values have no more readers than are looked at together (`exchange`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from shardwright.clusters import Links
from shardwright.ir.tensor_meta import itemsize
from shardwright.planning.splitting.domains import Domain
from shardwright.planning.splitting.elimination import CostFactor
from shardwright.planning.splitting.exchange import (
    JOINT,
    TOGETHER,
    Column,
    ReadPort,
    ValueExchange,
    ValueSource,
    Wanted,
    Weight,
    layouts_of,
    weight_table,
    whole_table,
)
from shardwright.planning.splitting.prices import PricedTensor, Table, prices
from shardwright.sharding.place import Outline


class ModelValue(NamedTuple):
    """A value as its tables know it: its shape, what makes or stores it, and its reads."""

    tensor: PricedTensor
    source: ValueSource | Weight
    ports: tuple[ReadPort, ...]


class Joint(NamedTuple):
    """The layouts that several readers have a value brought to: none, one, or one and then another.

    ``own`` is what each costs, by the maker's strategy where there is a maker. ``fits`` says for
    each reader, by option and strategy, what is excluded (infinite).
    """

    own: Table
    fits: tuple[Table, ...]


@dataclass(slots=True)
class ValueTables:
    """Makes tables, each once."""

    known: dict[object, Table] = field(default_factory=dict)
    joints: dict[ModelValue, Joint | None] = field(default_factory=dict)

    def table(self, value: ModelValue) -> Table:
        """Of a value with at most two readers."""
        if value not in self.known:
            columns = [port.column() for port in value.ports]
            kinds = [column.kinds for column in columns]
            table = self._seconds(value, *kinds)
            table = table.reshape(table.shape[: table.ndim - 2 + len(columns)])
            self.known[value] = self._spread(value, table, columns)
        return self.known[value]

    def share(self, value: ModelValue, number: int) -> Table:
        """What one of many readers pays: its share of what the value would cost if all did so."""
        port, count = value.ports[number], len(value.ports)
        key = (value.tensor, value.source, port, count)
        if key not in self.known:
            column = port.column()
            table = self._seconds(value, column.kinds)[..., 0] / count
            self.known[key] = self._spread(value, table, [column])
        return self.known[key]

    def joint(self, value: ModelValue) -> Joint | None:
        """What joins several readers; None where they have too many layouts to choose from."""
        if value not in self.joints:
            self.joints[value] = self._joint(value)
        return self.joints[value]

    def whole(self, domains: tuple[Domain, ...]) -> Table:
        """As `whole_table`, of makers and their reader."""
        if domains not in self.known:
            self.known[domains] = whole_table(domains[:-1], domains[-1])
        return self.known[domains]

    def reordered(self, table: Table, places: Sequence[int]) -> Table:
        """A table whose dimensions go to other places, two to the same where choices are one."""
        key = ("reordered", id(table), tuple(places))
        if key not in self.known:
            letters = "".join(chr(ord("a") + place) for place in places)
            made = np.einsum(f"{letters}->{''.join(sorted(set(letters)))}", table)
            self.known[key] = np.ascontiguousarray(made)
            self.known["kept", id(table)] = table
        return self.known[key]

    # --- making -------------------------------------------------------------------------------

    def _seconds(
        self,
        value: ModelValue,
        first: Sequence[Wanted | None] = (None,),
        second: Sequence[Wanted | None] = (None,),
    ) -> Table:
        """By how a value is made, if a node makes it, and how it is read first and then."""
        if isinstance(value.source, Weight):
            between = prices(value.tensor, layouts_of((), (*first, *second)))
            return weight_table(between, value.source, first, second)
        made = value.source.column().kinds
        between = prices(value.tensor, layouts_of(made, (*first, *second)))
        return ValueExchange(between, value.source, made).table(first, second)

    def _spread(
        self, value: ModelValue, table: Table, columns: Sequence[Column[Wanted | None]]
    ) -> Table:
        """From kinds to strategies."""
        indices = [column.of for column in columns]
        if isinstance(value.source, ValueSource):
            indices.insert(0, value.source.column().of)
        return np.ascontiguousarray(table[np.ix_(*indices)]) if indices else table

    def _joint(self, value: ModelValue) -> Joint | None:
        columns = [port.column() for port in value.ports]
        kinds = list(dict.fromkeys(k for c in columns for k in c.kinds if k is not None))
        count = len(kinds)
        pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
        options: list[tuple[int, ...]] = [(), *((i,) for i in range(count)), *pairs]
        if len(options) > JOINT:
            return None
        table = self._seconds(value, [*kinds, None], [*kinds, None])
        first = [option[0] if option else count for option in options]
        then = [option[1] if len(option) > 1 else count for option in options]
        own = table[..., first, then]
        if isinstance(value.source, ValueSource):
            own = own[value.source.column().of]
        numbers: dict[Wanted | None, int] = {kind: i for i, kind in enumerate(kinds)}
        fits = (
            _fits(options, [numbers.get(kind) for kind in column.kinds], is_first=not place)
            for place, column in enumerate(columns)
        )
        of = (column.of for column in columns)
        spread = (table[:, index] for table, index in zip(fits, of, strict=True))
        return Joint(np.ascontiguousarray(own), tuple(map(np.ascontiguousarray, spread)))


def _fits(
    options: Sequence[tuple[int, ...]], asked: Sequence[int | None], *, is_first: bool
) -> Table:
    """Where a reader gets what it asks for: 0; else infinite. The first reader's comes first."""
    table = np.full((len(options), len(asked)), np.inf)
    for row, option in enumerate(options):
        given = option[:1] if is_first else option
        for column, kind in enumerate(asked):
            if kind is None or kind in given:
                table[row, column] = 0.0
    return table


# --------------------------------------------------------------------------------------------------


class Objective(NamedTuple):
    """What counts: the backward too, a byte of a stored value, a second once a step."""

    training: bool
    byte_price: float
    once: float


@dataclass(slots=True)
class SplitModel:
    """Variables and factors.

    nodes
        The variable of each node.
    sizes
        How many choices each variable has.
    """

    outline: Outline
    domains: Sequence[Domain]
    mesh_sizes: tuple[int, ...]
    links: tuple[Links, ...]
    objective: Objective
    tables: ValueTables = field(default_factory=ValueTables)
    nodes: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    factors: list[CostFactor] = field(default_factory=list)
    joints: dict[int, tuple[int, Joint]] = field(default_factory=dict)
    """By value: the variable that joins its readers, and its tables."""

    def build(self) -> SplitModel:
        """Number the variables, and make the factors."""
        known = {v.id: self._value(v.id) for v in self.outline.view.stored()}
        known |= {value_id: self._value(value_id) for value_id in self.outline.makers}
        self._number(known)
        for variable, domain in zip(self.nodes, self.domains, strict=True):
            self.factors.append(CostFactor((variable,), domain.seconds))
        for value_id, value in known.items():
            self._add(value_id, value)
        for position, domain in enumerate(self.domains):
            if domain.is_head:
                self._add_whole(position)
        return self

    def _number(self, known: dict[int, ModelValue]) -> None:
        """Nodes in order; what joins the readers of a value comes right behind its maker."""
        readers = self.outline.readers
        for position, node in enumerate(self.outline.view.nodes):
            for value_id in dict.fromkeys(node.inputs):
                is_first = readers[value_id][0][0] == position
                if is_first and value_id in known and value_id not in self.outline.makers:
                    self._number_joint(value_id, known[value_id])
            self.nodes.append(len(self.sizes))
            self.sizes.append(len(self.domains[position].strategies))
            for value_id in node.outputs:
                self._number_joint(value_id, known[value_id])

    def _number_joint(self, value_id: int, value: ModelValue) -> None:
        joint = self.tables.joint(value) if 2 < len(value.ports) <= TOGETHER else None
        if joint is not None:
            self.joints[value_id] = len(self.sizes), joint
            self.sizes.append(joint.own.shape[-1])

    # --- values -------------------------------------------------------------------------------

    def _value(self, value_id: int) -> ModelValue:
        """What makes and reads a value."""
        value = self.outline.view.values[value_id]
        tensor = PricedTensor(value.shape, itemsize(value.dtype), self.mesh_sizes, self.links)
        ports = (
            ReadPort(self.domains[position], index, has_gradient)
            for position, index, has_gradient in self._reads(value_id)
        )
        return ModelValue(tensor, self._source(value_id), tuple(ports))

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

    def _source(self, value_id: int) -> ValueSource | Weight:
        """How a value comes to be; results leave the graph, numbers of a step once for all."""
        maker = self.outline.makers.get(value_id)
        training, view = self.objective.training, self.outline.view
        if maker is None:
            is_trained = training and value_id in self.outline.trained
            return Weight(self.objective.byte_price, self.objective.once, is_trained)
        once = training and not view.values[value_id].shape
        leaves = (self.objective.once if once else 1.0) if value_id in view.outputs else 0.0
        index = view.nodes[maker].outputs.index(value_id)
        is_loss = training and value_id in self.outline.losses
        return ValueSource(self.domains[maker], index, leaves, is_loss)

    def _add(self, value_id: int, value: ModelValue) -> None:
        """The factors of one value."""
        readers = [self.nodes[position] for position, _, _ in self._reads(value_id)]
        maker = self.outline.makers.get(value_id)
        makers = [] if maker is None else [self.nodes[maker]]
        if value_id in self.joints:
            variable, joint = self.joints[value_id]
            self._factor([*makers, variable], joint.own)
            for reader, table in zip(readers, joint.fits, strict=True):
                self._factor([variable, reader], table)
        elif len(readers) <= 2:
            self._factor([*makers, *readers], self.tables.table(value))
        else:
            for number, reader in enumerate(readers):
                self._factor([*makers, reader], self.tables.share(value, number))

    def _add_whole(self, position: int) -> None:
        """Where all is whole up to what a node reads, and at the node, it is so up to the node."""
        outline = self.outline
        makers = {
            outline.makers[v]
            for v in outline.view.nodes[position].inputs
            if v in outline.required and v in outline.makers
        }
        choices = [len(self.domains[p].strategies) for p in (*makers, position)]
        if makers and math.prod(choices) <= JOINT**2:
            domains = tuple(self.domains[p] for p in (*sorted(makers), position))
            scope = [self.nodes[p] for p in (*sorted(makers), position)]
            self._factor(scope, self.tables.whole(domains))

    def _factor(self, scope: list[int], table: Table) -> None:
        """Add a factor; where a variable stands twice in it, both choices are the same."""
        if not table.any():
            return
        distinct = sorted(set(scope))
        if distinct != scope:
            table = self.tables.reordered(table, [distinct.index(v) for v in scope])
        self.factors.append(CostFactor(tuple(distinct), table))
