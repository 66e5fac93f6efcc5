"""What it takes to bring a value from the node that makes it to those that read it, as tables.

`Prices` has the seconds between all layouts of a tensor, and the layouts on each way: the moves and
prices are those of `sharding.convert`, and so is the way, up to a picosecond a step; shortest ways
between all pairs are found by Floyd and Warshall's algorithm on arrays.

`exchange_table` and `weight_table` make of them tables for `elimination`: seconds by how a value is
made and how one or two nodes read it. A value is brought to a layout once, however many read it
there. The gradient goes the other way: terms that lie alike are added, and each sum is brought to
where the value was made. The gradient of a parameter is put together once a step, where its first
reader has it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.clusters import Links
from shardwright.sharding import Partial, Replicate, Shard
from shardwright.sharding.convert import PICOSECOND, move_kind, moves
from shardwright.sharding.layout import (
    Placement,
    Placements,
    largest_shape,
    leaves_none_empty,
    normal_form,
)
from shardwright.sharding.ranges import Shape
from shardwright.sharding.strategy import mirrored

STEPS = 256
"""Picoseconds are counted in these parts, of which a step takes one: fewer steps go first."""
MOST = 400
"""Layouts of one tensor that are looked at before any is asked for."""

Table = NDArray[np.float64]
Numbers = NDArray[np.intp]


class PricedTensor(NamedTuple):
    """A tensor on a mesh, as far as prices know it."""

    shape: Shape
    itemsize: int
    sizes: tuple[int, ...]
    links: tuple[Links, ...]

    def nbytes(self, placements: Placements) -> int:
        """The most bytes that a slot holds."""
        return math.prod(largest_shape(placements, self.sizes, self.shape)) * self.itemsize


@dataclass(frozen=True, eq=False)
class Prices:
    """Layouts by number, and what it takes from one to another.

    numbers
        The number of each layout, in normal form.
    seconds
        ``seconds[a, b]`` from layout a to layout b; infinite where nothing leads there.
    onward
        ``onward[a, b]`` is the first layout on the way, b itself where it is one step.
    """

    tensor: PricedTensor
    numbers: dict[Placements, int]
    seconds: Table
    onward: Numbers
    known: dict[tuple[int, int], Table] = field(default_factory=dict)

    def numbered(self, layouts: Iterable[Placements | None]) -> Numbers:
        """Layouts as numbers, -1 for none."""
        return np.array([-1 if p is None else self.numbers[p] for p in layouts], np.intp)

    def way(self, source: int, target: int) -> list[int]:
        """The layouts from one to another, both included."""
        found = [source]
        while source != target:
            source = int(self.onward[source, target])
            found.append(source)
        return found

    def after(self, source: int, target: int) -> Table:
        """Seconds to each layout once a tensor was brought from one to another.

        Every layout on the way is held. Terms can be gone on with only while all that is held is
        terms: while nothing has reduced them.
        """
        if (source, target) not in self.known:
            rows = self.seconds[self.way(source, target)]
            least = np.where(np.isinf(rows).any(axis=0), np.inf, rows.min(axis=0))
            if np.isinf(self.seconds[source, target]):
                least = np.full(len(self.numbers), np.inf)
            self.known[source, target] = least
        return self.known[source, target]


def prices(tensor: PricedTensor, layouts: Iterable[Placements]) -> Prices:
    """The prices between these layouts, in normal form, and those on the way."""
    asked, usual = frozenset(layouts), _usual(tensor.shape, tensor.sizes)
    return _prices(tensor, usual if asked <= usual else usual | asked)


@lru_cache(maxsize=4096)
def _usual(shape: Shape, sizes: tuple[int, ...]) -> frozenset[Placements]:
    """The layouts without units and with no reduction but sums, that leave no slot without data.

    Where these would be too many, none: tables then have what is asked for.
    """
    each: list[Placement] = [Replicate(), Partial(), *map(Shard, range(len(shape)))]
    if len(each) ** len(sizes) > MOST:
        return frozenset()
    found = itertools.product(*(each if size > 1 else each[:1] for size in sizes))
    return frozenset(
        normal_form(placements, sizes, shape)
        for placements in found
        if leaves_none_empty(placements, sizes, shape)
    )


class _MoveEdge(NamedTuple):
    """A move between two layouts by number, its price, and its place among equally cheap ones."""

    source: int
    target: int
    price: float
    rank: tuple[int, int, int]


@lru_cache(maxsize=4096)
def _prices(tensor: PricedTensor, asked: frozenset[Placements]) -> Prices:
    units = _units(asked, len(tensor.shape))
    pending = sorted(asked, key=str)
    numbers = {layout: number for number, layout in enumerate(pending)}
    held = {layout: tensor.nbytes(layout) for layout in pending}
    edges: list[_MoveEdge] = []
    while pending:
        here = pending.pop()
        for axis, there in _moves(tensor, here, units, asked):
            if there not in numbers:
                numbers[there] = len(numbers)
                held[there] = tensor.nbytes(there)
                pending.append(there)
            kind = move_kind(here[axis], there[axis])
            most = max(held[here], held[there])
            spent = tensor.links[axis].seconds(kind, tensor.sizes[axis], most)
            price = round(spent / PICOSECOND) * STEPS + 1
            edges.append(_MoveEdge(numbers[here], numbers[there], price, _rank(axis, there)))
    total, onward = _shortest(len(numbers), edges)
    return Prices(tensor, numbers, np.floor(total / STEPS) * PICOSECOND, onward)


def _rank(axis: int, there: Placements) -> tuple[int, int, int]:
    """The order in which `convert` prefers moves: by axis, replicating first, then by dimension."""
    placement = there[axis]
    if isinstance(placement, Shard):
        return axis, placement.dim + 1, placement.unit
    return axis, 0, 0


def _units(asked: Iterable[Placements], ndim: int) -> list[list[int]]:
    """The units in which each dimension may be cut on a way."""
    found: list[set[int]] = [{1} for _ in range(ndim)]
    for placements in asked:
        for placement in placements:
            if isinstance(placement, Shard):
                found[placement.dim].add(placement.unit)
    return [sorted(units) for units in found]


def _moves(
    tensor: PricedTensor,
    here: Placements,
    units: Sequence[Sequence[int]],
    asked: frozenset[Placements],
) -> Iterator[tuple[int, Placements]]:
    """The right moves; none leaves a slot without data, but to a layout that is asked for."""
    for axis, there in moves(here, tensor.sizes, tensor.shape, units):
        if there in asked or leaves_none_empty(there, tensor.sizes, tensor.shape):
            yield axis, there


def _shortest(count: int, edges: Sequence[_MoveEdge]) -> tuple[Table, Numbers]:
    """The least sums of edges between all pairs, and the first number on each way."""
    spent = np.full((count, count), np.inf)
    np.fill_diagonal(spent, 0.0)
    for edge in edges:
        spent[edge.source, edge.target] = edge.price
    for over in range(count):
        np.minimum(spent, spent[:, over, None] + spent[None, over, :], out=spent)
    onward = np.tile(np.arange(count), (count, 1))
    for edge in sorted(edges, key=lambda edge: edge.rank, reverse=True):
        begins = edge.price + spent[edge.target] == spent[edge.source]
        onward[edge.source][begins & np.isfinite(spent[edge.source])] = edge.target
    return spent, onward


# --- tables of a value ----------------------------------------------------------------------------


class ReadLayouts(NamedTuple):
    """How a strategy reads a value, and how it makes the gradient; None where it makes none."""

    layout: Placements
    gradient: Placements | None


Reads = Sequence[ReadLayouts | None]
"""Distinct ways to read a value; None where only its dtype is read."""


def layouts_of(made: Iterable[Placements], reads: Iterable[ReadLayouts | None]) -> set[Placements]:
    """The layouts between which a value and its gradient may have to go."""
    found: set[Placements] = set()
    for layout in made:
        found |= {layout, mirrored(layout), (Replicate(),) * len(layout)}
    for read in reads:
        if read is not None:
            found |= {read.layout} if read.gradient is None else {read.layout, read.gradient}
    return found


def exchange_table(
    between: Prices, made: Sequence[Placements], leaves: float, first: Reads, second: Reads
) -> Table:
    """Seconds by how a value is made, how it is read first, and how it is read then.

    ``leaves`` is what bringing it out of the graph counts for, 0 where it is no result.
    """
    makes = between.numbered(made)
    one, two = (_layouts(between, reads) for reads in (first, second))
    held = np.array(
        [[between.after(m, r if r >= 0 else m) for r in one.tolist()] for m in makes.tolist()]
    )
    to_first = np.where(one >= 0, between.seconds[np.ix_(makes, one)], 0.0)
    to_second = np.where(two >= 0, held[:, :, two], 0.0)
    total = to_first[:, :, None] + to_second + _gradient_seconds(between, made, first, second)
    if leaves:
        total = total + leaves * _leaving_seconds(between, makes, one, two, held)
    return total


def _layouts(between: Prices, reads: Reads) -> Numbers:
    return between.numbered(None if read is None else read.layout for read in reads)


def _gradient_seconds(
    between: Prices, made: Sequence[Placements], first: Reads, second: Reads
) -> Table:
    """Seconds that bring the gradient's terms to where the value was made."""
    one, two = (
        between.numbered(None if read is None else read.gradient for read in reads)
        for reads in (first, second)
    )
    to_maker = between.seconds[:, between.numbered(map(mirrored, made))].T
    of_first, of_second = (np.where(n >= 0, to_maker[:, n], 0.0) for n in (one, two))
    alike = (one[:, None] == two[None, :]) & (one >= 0)[:, None]
    total: Table = of_first[:, :, None] + np.where(alike, 0.0, of_second[:, None, :])
    return total


def _leaving_seconds(
    between: Prices, makes: Numbers, one: Numbers, two: Numbers, held: Table
) -> Table:
    """Seconds to a layout without terms, where neither its maker nor a reader has the value so."""
    replicated = between.numbers[(Replicate(),) * len(between.tensor.sizes)]
    terms = np.array([any(isinstance(p, Partial) for p in layout) for layout in between.numbers])
    read_so = [(numbers < 0) | terms[numbers] for numbers in (one, two)]
    needed = terms[makes][:, None, None] & read_so[0][:, None] & read_so[1]
    from_second = np.where(two >= 0, between.seconds[two, replicated], np.inf)
    found: Table = np.where(needed, np.minimum(held[:, :, replicated, None], from_second), 0.0)
    return found


def weight_table(between: Prices, once: float, first: Reads, second: Reads) -> Table:
    """What the gradient of a stored value takes, by how it is read first and then.

    ``once`` is what a second once a step counts for; 0 where it is not trained. The gradient is put
    together where the first reader has the value; another copy is renewed from there.
    """
    table = np.zeros((len(first), len(second)))
    for i, one in enumerate(first if once else ()):
        for j, two in enumerate(second):
            reads = [read for read in (one, two) if read is not None]
            copies = list(dict.fromkeys(between.numbers[read.layout] for read in reads))
            if copies:
                terms = {between.numbers[read.gradient] for read in reads if read.gradient}
                moved = sum(between.seconds[term, copies[0]] for term in terms)
                moved += sum(between.seconds[copies[0], copy] for copy in copies[1:])
                table[i, j] = once * moved
    return table
