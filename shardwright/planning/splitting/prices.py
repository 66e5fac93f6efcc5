"""What it takes from any layout of a tensor to any other: all of `sharding.convert`'s ways at once.

Comes in: a tensor's shape and bytes an element, the sizes and links of a mesh's axes, and the
layouts that may occur. Goes out: `Prices`, a table of seconds between all of them, and the layouts
on each way. The moves and their prices are those of `sharding.convert`; shortest ways between all
pairs are found by Floyd and Warshall's algorithm on arrays.

What always holds: what the table says of two layouts is what `convert` says, up to a picosecond a
step, and the way is the same.
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
from shardwright.sharding.layout import largest_shape, leaves_none_empty, normal_form
from shardwright.sharding.placement import Placement, Placements
from shardwright.sharding.ranges import Shape

STEPS = 256
"""Picoseconds are counted in these parts, of which a step takes one: fewer steps go first."""

MOST = 400
"""Layouts of one tensor that are looked at before any is asked for."""

Table = NDArray[np.float64]


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
    layouts: tuple[Placements, ...]
    seconds: Table
    onward: NDArray[np.intp]
    known: dict[tuple[int, int], Table] = field(default_factory=dict)

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
                least = np.full(len(self.layouts), np.inf)
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


@lru_cache(maxsize=4096)
def _prices(tensor: PricedTensor, asked: frozenset[Placements]) -> Prices:
    units = _units(asked, len(tensor.shape))
    numbers: dict[Placements, int] = {}
    edges: list[_MoveEdge] = []
    pending = sorted(asked, key=str)
    for layout in pending:
        numbers[layout] = len(numbers)
    held = {layout: tensor.nbytes(layout) for layout in pending}
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
    seconds = np.floor(total / STEPS) * PICOSECOND
    return Prices(tensor, numbers, tuple(numbers), seconds, onward)


class _MoveEdge(NamedTuple):
    """A move between two layouts by number, its price, and its place among equally cheap ones."""

    source: int
    target: int
    price: float
    rank: tuple[int, int, int]


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


def _shortest(count: int, edges: Sequence[_MoveEdge]) -> tuple[Table, NDArray[np.intp]]:
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


def are_partial(layouts: Sequence[Placements]) -> NDArray[np.bool_]:
    """For each layout and axis, whether the slots along it hold terms."""
    return np.array([[isinstance(p, Partial) for p in layout] for layout in layouts], bool)
