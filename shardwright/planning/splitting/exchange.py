"""What it takes to bring a value from the node that makes it to those that read it, as tables.

Comes in: the domain of a value's maker, those of its readers, and prices between layouts. Goes out:
factors for `elimination`: seconds for each combination of strategies, as `walk` would count them.

A value is brought to a layout once, however many read it there, so that its readers hang together.
One or two readers are in one table with the maker. Three or four are joined by a variable of their
own, the layouts (one or two) that the value is brought to. Of more readers each pays its share, as
if all asked for the same, which equal layers do.

The gradient goes the other way: terms that lie alike are added, and each sum is brought to where
the value was made. A parameter's readers hang together alike: by its copies, and by its gradient,
which is put together once a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from shardwright.planning.splitting.domains import Domain
from shardwright.planning.splitting.prices import Prices, Table, are_partial
from shardwright.sharding import Replicate
from shardwright.sharding.placement import Placements
from shardwright.sharding.strategy import Strategy

T = TypeVar("T")
Numbers = NDArray[np.intp]
Bools = NDArray[np.bool_]
Axes = frozenset[int]
NO_AXES: Axes = frozenset()
TOGETHER = 4
"""Readers that are looked at together; of more each pays its share."""
JOINT = 1500
"""Combinations of layouts that a variable of a value's readers may have."""


class StrategyLayouts(NamedTuple):
    """How a strategy makes a value, and how it wants the gradient."""

    layout: Placements
    mirror: Placements
    kept: Axes
    whole: Axes


class Wanted(NamedTuple):
    """How a strategy reads a value, and how it makes the gradient; None where it makes none.

    ``whole`` are axes along which the maker must be whole with all before it.
    """

    layout: Placements
    gradient: Placements | None
    whole: Axes = NO_AXES


@dataclass(frozen=True, eq=False)
class Column(Generic[T]):
    """The distinct kinds among a domain's strategies, and the kind of each strategy."""

    kinds: tuple[T, ...]
    of: Numbers

    @classmethod
    def of_strategies(cls, kinds: Sequence[T]) -> Column[T]:
        """Kinds, one a strategy."""
        numbers: dict[T, int] = {}
        of = np.array([numbers.setdefault(kind, len(numbers)) for kind in kinds], np.intp)
        return cls(tuple(numbers), of)


class ReadPort(NamedTuple):
    """A read of a value: by which domain, as which input, and whether a gradient comes back."""

    domain: Domain
    number: int
    has_gradient: bool

    def column(self) -> Column[Wanted | None]:
        """How the domain's strategies read; None where only the dtype is read."""
        return Column.of_strategies([self._wanted(found) for found in self.domain.strategies])

    def _wanted(self, found: Strategy) -> Wanted | None:
        read = found.reads[self.number]
        if read is None or not self.has_gradient:
            return None if read is None else Wanted(read, None)
        return Wanted(read, found.returns[self.number], found.whole)


class ValueSource(NamedTuple):
    """A value that a node makes: by which domain, as which output.

    ``leaves`` is what bringing it out of the graph counts for, 0 where it is no result; a ``loss``
    is where gradients begin.
    """

    domain: Domain
    number: int
    leaves: float = 0.0
    is_loss: bool = False

    def column(self) -> Column[StrategyLayouts]:
        """How the domain's strategies make it."""
        index = self.number
        return Column.of_strategies(
            [
                StrategyLayouts(found.makes[index], found.mirror(index), found.kept, found.whole)
                for found in self.domain.strategies
            ]
        )


class Weight(NamedTuple):
    """A stored value: what a byte on a slot costs, and what a second once a step counts for."""

    byte_price: float
    once: float
    is_trained: bool


def layouts_of(made: Iterable[StrategyLayouts], wanted: Iterable[Wanted | None]) -> set[Placements]:
    """The layouts between which a value and its gradient may have to go."""
    found: set[Placements] = set()
    for kind in made:
        found |= {kind.layout, kind.mirror, (Replicate(),) * len(kind.layout)}
    for read in wanted:
        if read is not None:
            found |= {read.layout} if read.gradient is None else {read.layout, read.gradient}
    return found


class ValueExchange:
    """A value that a node makes, and up to two reads of it: seconds by kinds."""

    def __init__(
        self, prices: Prices, source: ValueSource, made: Sequence[StrategyLayouts]
    ) -> None:
        self.prices, self.source, self.made = prices, source, made
        self.makes = self._numbers([kind.layout for kind in made])
        self.mirrors = self._numbers([kind.mirror for kind in made])
        self.partial = are_partial(prices.layouts)
        whole = self._axes([kind.whole for kind in made])
        self.is_whole, self.is_kept = whole, self._axes([kind.kept for kind in made])
        self.replicated = prices.numbers[(Replicate(),) * len(prices.tensor.sizes)]

    def table(
        self, first: Sequence[Wanted | None], second: Sequence[Wanted | None] = (None,)
    ) -> Table:
        """Seconds by how the value is made, how it is read first, and how it is read then."""
        held = self._held(first)
        reads = self._numbers([None if kind is None else kind.layout for kind in second])
        forward = self._first(first)[:, :, None] + np.where(reads >= 0, held[:, :, reads], 0.0)
        allowed = self._allowed(first)[:, :, None] & self._allowed(second)[:, None, :]
        seconds = forward + self._back(first, second) + self._leaving(first, second, held)
        return np.where(allowed, seconds, np.inf)

    # --- forward ------------------------------------------------------------------------------

    def _first(self, wanted: Sequence[Wanted | None]) -> Table:
        """Seconds to where the value is read first."""
        reads = self._numbers([None if kind is None else kind.layout for kind in wanted])
        return np.where(reads >= 0, self.prices.seconds[np.ix_(self.makes, reads)], 0.0)

    def _held(self, wanted: Sequence[Wanted | None]) -> Table:
        """Seconds to each layout once the value was brought to where it is read first."""
        reads = self._numbers([None if kind is None else kind.layout for kind in wanted]).tolist()
        after = self.prices.after
        makes = self.makes.tolist()
        return np.array([[after(s, r if r >= 0 else s) for r in reads] for s in makes])

    def _leaving(
        self, first: Sequence[Wanted | None], second: Sequence[Wanted | None], held: Table
    ) -> Table:
        """Seconds to a layout without terms, for a result of the graph."""
        if not self.source.leaves:
            return np.zeros((1, 1, 1))
        terms: Bools = np.any(self.partial, axis=1)
        reads = [
            self._numbers([None if kind is None else kind.layout for kind in kinds])
            for kinds in (first, second)
        ]
        one, two = (np.where(numbers >= 0, terms[numbers], np.True_) for numbers in reads)
        needed = np.logical_and.outer(np.logical_and.outer(terms[self.makes], one), two)
        from_second = np.where(
            reads[1] >= 0, self.prices.seconds[reads[1], self.replicated], np.inf
        )
        seconds = np.minimum(held[:, :, self.replicated, None], from_second)
        return np.where(needed, self.source.leaves * seconds, 0.0)

    # --- backward -----------------------------------------------------------------------------

    def _back(self, first: Sequence[Wanted | None], second: Sequence[Wanted | None]) -> Table:
        """Seconds that bring the gradient's terms to where the value was made."""
        one, two = (
            self._numbers([None if kind is None else kind.gradient for kind in kinds])
            for kinds in (first, second)
        )
        to_mirror = self.prices.seconds[:, self.mirrors].T
        seconds = [np.where(n >= 0, to_mirror[:, n], 0.0) for n in (one, two)]
        alike = (one[:, None] == two[None, :]) & (one >= 0)[:, None]
        total = seconds[0][:, :, None] + np.where(alike, 0.0, seconds[1][:, None, :])
        return np.where(self._terms_would_stay(one, two), np.inf, total)

    def _terms_would_stay(self, one: Numbers, two: Numbers) -> Bools:
        """Where the gradient would stay in terms, but the strategy says it does not, or not so."""
        absent = [(n < 0)[:, None] for n in (one, two)]
        first, then = (
            np.where(gone, True, self.partial[n])
            for gone, n in zip(absent, (one, two), strict=True)
        )
        none: Bools = absent[0][:, None, :] & absent[1][None, :, :]
        every: Bools = first[:, None, :] & then[None, :, :] & ~none
        if self.source.is_loss:  # where the gradient begins, whole
            every, none = np.zeros_like(every), np.zeros_like(none)
        lost = self.is_kept[:, None, None, :] & ~every & ~none
        kept_less = self.is_whole & ~self.is_kept & self.source.domain.single
        stays: Bools = np.any(lost | (kept_less[:, None, None, :] & every), axis=-1)
        return stays

    def _allowed(self, wanted: Sequence[Wanted | None]) -> Bools:
        """Where all is whole up to a reader only along axes along which it is up to the maker."""
        whole = self._axes([NO_AXES if kind is None else kind.whole for kind in wanted])
        lacking: Bools = np.any(whole[None] & ~self.is_whole[:, None], axis=-1)
        return ~lacking

    # --- numbers ------------------------------------------------------------------------------

    def _numbers(self, layouts: Sequence[Placements | None]) -> Numbers:
        """Layouts as numbers, -1 for none."""
        numbers = self.prices.numbers
        return np.array([-1 if p is None else numbers[p] for p in layouts], np.intp)

    def _axes(self, found: Sequence[Axes]) -> Bools:
        count = len(self.prices.tensor.sizes)
        return np.array([[axis in axes for axis in range(count)] for axes in found], bool)


def weight_table(
    prices: Prices,
    weight: Weight,
    first: Sequence[Wanted | None],
    second: Sequence[Wanted | None] = (None,),
) -> Table:
    """What a stored value's copies cost, and its gradient, by how it is read first and then.

    The gradient is put together where the first reader has the value; another copy is renewed from
    there.
    """
    nbytes = np.array([prices.tensor.nbytes(layout) for layout in prices.layouts], float)
    table = np.zeros((len(first), len(second)))
    for i, one in enumerate(first):
        for j, two in enumerate(second):
            reads = [kind for kind in (one, two) if kind is not None]
            copies = list(dict.fromkeys(prices.numbers[kind.layout] for kind in reads))
            table[i, j] = weight.byte_price * sum(nbytes[copy] for copy in copies)
            if weight.is_trained and copies:
                terms = {prices.numbers[kind.gradient] for kind in reads if kind.gradient}
                moved = sum(prices.seconds[term, copies[0]] for term in terms)
                moved += sum(prices.seconds[copies[0], copy] for copy in copies[1:])
                table[i, j] += weight.once * moved
    return table


def whole_table(makers: Sequence[Domain], reader: Domain) -> Table:
    """Infinite where all is whole up to every maker and at the reader, which says it is not so."""
    count = len(reader.strategies[0].splits)
    table = np.zeros([len(domain.strategies) for domain in (*makers, reader)])
    for axis in range(count):
        denies = [
            found.splits[axis] is None and axis not in found.whole for found in reader.strategies
        ]
        columns = [[axis in found.whole for found in maker.strategies] for maker in makers]
        table[np.ix_(*map(np.array, columns), np.array(denies))] = np.inf
    return table
