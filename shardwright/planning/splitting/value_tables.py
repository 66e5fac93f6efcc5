"""The tables of one value over strategies, each made once for all values that are alike.

Comes in: what makes a value and what reads it. Goes out: tables over the strategies of its maker
and readers, in that order, or over the layouts that join several readers (`Joint`). What always
holds: values whose shapes, makers and readers are alike get the same object, by which `elimination`
knows equal layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from shardwright.planning.splitting.domains import Domain
from shardwright.planning.splitting.exchange import (
    JOINT,
    Column,
    Exchange,
    Port,
    Source,
    Wanted,
    Weight,
    layouts_of,
    weight_table,
    whole_table,
)
from shardwright.planning.splitting.prices import Table, Tensor, prices


class Value(NamedTuple):
    """A value as its tables know it: its shape, what makes or stores it, and its reads."""

    tensor: Tensor
    source: Source | Weight
    ports: tuple[Port, ...]


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
    joints: dict[Value, Joint | None] = field(default_factory=dict)

    def table(self, value: Value) -> Table:
        """Of a value with at most two readers."""
        if value not in self.known:
            columns = [port.column() for port in value.ports]
            kinds = [column.kinds for column in columns]
            table = self._seconds(value, *kinds)
            table = table.reshape(table.shape[: table.ndim - 2 + len(columns)])
            self.known[value] = self._spread(value, table, columns)
        return self.known[value]

    def share(self, value: Value, number: int) -> Table:
        """What one of many readers pays: its share of what the value would cost if all did so."""
        port, count = value.ports[number], len(value.ports)
        key = (value.tensor, value.source, port, count)
        if key not in self.known:
            column = port.column()
            table = self._seconds(value, column.kinds)[..., 0] / count
            self.known[key] = self._spread(value, table, [column])
        return self.known[key]

    def joint(self, value: Value) -> Joint | None:
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
        value: Value,
        first: Sequence[Wanted | None] = (None,),
        second: Sequence[Wanted | None] = (None,),
    ) -> Table:
        """By how a value is made, if a node makes it, and how it is read first and then."""
        if isinstance(value.source, Weight):
            between = prices(value.tensor, layouts_of((), (*first, *second)))
            return weight_table(between, value.source, first, second)
        made = value.source.column().kinds
        between = prices(value.tensor, layouts_of(made, (*first, *second)))
        return Exchange(between, value.source, made).table(first, second)

    def _spread(
        self, value: Value, table: Table, columns: Sequence[Column[Wanted | None]]
    ) -> Table:
        """From kinds to strategies."""
        indices = [column.of for column in columns]
        if isinstance(value.source, Source):
            indices.insert(0, value.source.column().of)
        return np.ascontiguousarray(table[np.ix_(*indices)]) if indices else table

    def _joint(self, value: Value) -> Joint | None:
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
        if isinstance(value.source, Source):
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
