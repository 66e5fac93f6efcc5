"""Placement: which buffers a plan has, and where each value lies in them.

Comes in: a graph, who makes and reads its values when (`Sharer`), and what shares memory. Goes out:
buffers, and a `Home` for every value that lies somewhere. What always holds: buffer 0 is the arena,
and what is needed at once has places there that do not overlap.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from shardwright.compiler.arena import Arena, Interval, make_arena
from shardwright.compiler.inplace import Sharer, Sharing
from shardwright.ir.tensor_meta import itemsize
from shardwright.kernels.lowered import ABSENT, LoweredGraph
from shardwright.kernels.spots import Spot, nbytes

ARENA = 0
"""The arena's number among the buffers."""

BufferKind = Literal["arena", "input", "stored", "output"]


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory with an address of its own; ``vid`` is the value that it is, ABSENT for the arena."""

    kind: BufferKind
    vid: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Home:
    """Where a value lies: bytes from its buffer's begin, strides in elements."""

    buffer: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Placement:
    """Buffers, and the place of each root's memory."""

    def __init__(
        self,
        graph: LoweredGraph,
        spots: Mapping[int, Spot],
        sharer: Sharer,
        sharing: Sharing,
        outputs: Literal["arena", "caller"],
    ) -> None:
        self._graph = graph
        self._spots = spots
        self._owner = sharing.owner
        external = [*graph.inputs, *self._stored(sharer)]
        owned = self._owned(outputs, sharer) if outputs == "caller" else []
        in_arena = self._lives(sharer, {*external, *owned})
        self.arena: Arena = make_arena(list(in_arena.values()))
        self.buffers = (
            Buffer("arena", ABSENT, self.arena.size),
            *(self._buffer("input", vid) for vid in graph.inputs),
            *(self._buffer("stored", vid) for vid in external[len(graph.inputs) :]),
            *(self._buffer("output", vid) for vid in owned),
        )
        self._places: dict[int, tuple[int, int]] = {
            buffer.vid: (k, 0) for k, buffer in enumerate(self.buffers) if k != ARENA
        }
        for root, offset in zip(in_arena, self.arena.offsets, strict=True):
            self._places[root] = (ARENA, offset)

    def homes(self) -> dict[int, Home]:
        """The home of every value that lies somewhere."""
        found = {}
        for vid, spot in self._spots.items():
            place = self._places.get(self._owner[spot.root])
            if place is not None:
                size = itemsize(self._graph.values[vid].dtype)
                found[vid] = Home(place[0], place[1] + spot.offset * size, spot.shape, spot.strides)
        return found

    def _stored(self, sharer: Sharer) -> list[int]:
        """Stored values that are read, returned or written."""
        inputs = set(self._graph.inputs)
        return [
            vid
            for vid in self._graph.values
            if vid not in sharer.first
            and vid not in inputs
            and vid in self._owner
            and (vid in sharer.last or vid in self._graph.updates)
        ]

    def _owned(self, outputs: str, sharer: Sharer) -> list[int]:
        """The roots of outputs that are no external values."""
        owners = (self._owner[self._spots[vid].root] for vid in self._graph.outputs)
        return list(dict.fromkeys(owner for owner in owners if owner in sharer.first))

    def _lives(self, sharer: Sharer, external: Collection[int]) -> dict[int, Interval]:
        """From when to when each owner in the arena is needed."""
        ends: dict[int, int] = {}
        for root in sharer.first:
            owner = self._owner[root]
            if owner not in external:
                ends[owner] = max(ends.get(owner, 0), sharer.last[root])
        return {
            owner: Interval(sharer.first[owner], end, nbytes(self._graph.values[owner]))
            for owner, end in ends.items()
        }

    def _buffer(self, kind: BufferKind, vid: int) -> Buffer:
        return Buffer(kind, vid, nbytes(self._graph.values[vid]))
