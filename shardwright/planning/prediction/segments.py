"""A forward as segments: repeated blocks, and what lies between them, with how they are wired.

Comes in: a forward's nodes and their repeated blocks. Goes out: `Segment`, in order, which have all
nodes. What always holds: where two segments have the same wiring, their nodes read from the same
places in them, or the same of the values that come from outside, so that what is found out by
walking through one is true of the other, if those values lie alike.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from shardwright.ir import IRGraph
from shardwright.ir.repeats import Repeat


class Place(NamedTuple):
    """A value as a segment knows it: output ``number`` of the node at ``offset``.

    With the offset `OUTSIDE` it is one of the values that come from outside.
    """

    offset: int
    number: int


OUTSIDE = -1


@dataclass(frozen=True, slots=True)
class Segment:
    """Nodes from ``start`` to before ``stop``.

    wiring
        Equal for segments that are wired alike.
    outside
        Values that it reads and others make or read, too.
    made
        What it makes that others read.
    """

    start: int
    stop: int
    wiring: int
    outside: tuple[int, ...]
    made: tuple[Place, ...]

    def value(self, view: IRGraph, place: Place) -> int:
        """The id of a value."""
        if place.offset == OUTSIDE:
            return self.outside[place.number]
        return view.nodes[self.start + place.offset].outputs[place.number]

    def place(self, view: IRGraph, value_id: int) -> Place:
        """Where a value is that it makes, or reads from outside."""
        if value_id in self.outside:
            return Place(OUTSIDE, self.outside.index(value_id))
        return next(
            Place(offset, node.outputs.index(value_id))
            for offset, node in enumerate(view.nodes[self.start : self.stop])
            if value_id in node.outputs
        )


def segments(view: IRGraph, repeats: Sequence[Repeat], trained: Collection[int]) -> list[Segment]:
    """The segments of a forward, of which these parameters are trained."""
    cuts = {0, len(view.nodes), *(cut for repeat in repeats for cut in repeat.cuts)}
    wirings: dict[Hashable, int] = {}
    return [
        _Wiring(view, start, stop, trained).segment(wirings)
        for start, stop in pairwise(sorted(cuts))
    ]


class _Wiring:
    """How one segment is wired; `segment` gives it."""

    def __init__(self, view: IRGraph, start: int, stop: int, trained: Collection[int]) -> None:
        self._view, self._start, self._stop, self._trained = view, start, stop, trained
        self._nodes = view.nodes[start:stop]
        self._inside = {node.id for node in self._nodes}
        self._made = {
            value_id: Place(offset, index)
            for offset, node in enumerate(self._nodes)
            for index, value_id in enumerate(node.outputs)
        }
        self._outside: dict[int, int] = {}
        self._own: dict[int, int] = {}
        """Stored values that no other segment reads."""

    def segment(self, wirings: dict[Hashable, int]) -> Segment:
        """The segment; ``wirings`` numbers those that are known."""
        reads = tuple(tuple(map(self._read, node.inputs)) for node in self._nodes)
        made = tuple(self._read_elsewhere())
        wiring = wirings.setdefault((reads, made), len(wirings))
        return Segment(self._start, self._stop, wiring, tuple(self._outside), made)

    def _read(self, value_id: int) -> Hashable:
        if value_id in self._made:
            return self._made[value_id]
        value = self._view.values[value_id]
        kind = value.producer is None, value_id in self._trained
        if value.is_stored and self._inside.issuperset(value.users):
            return "own", self._own.setdefault(value_id, len(self._own)), kind
        return "outside", self._outside.setdefault(value_id, len(self._outside)), kind

    def _read_elsewhere(self) -> Iterator[Place]:
        for value_id, place in self._made.items():
            if not self._inside.issuperset(self._view.values[value_id].users):
                yield place
