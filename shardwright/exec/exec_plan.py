"""ExecPlan: where every value of a lowered graph lies, and which calls run in which order.

Comes in: a `LoweredGraph`, and what the caller gives away or promises. Goes out: an `ExecPlan`.
What always holds of one: every value has a home, a place in a buffer; buffer 0 is the arena, each
other one external memory (an input, a stored value, an output that the caller owns). After all
calls have run, the home of each output holds it, and each stored value's memory its new contents.
No two values that are needed at once overlap, unless one is a view of the other.

Memory is shared as `inplace` decides: views lie in what they view, outputs in inputs that are read
no more, updates in what they update. Where an update cannot be made in place, a copy stands at the
end; where a result lies in memory that is written over, a copy keeps it from before.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from shardwright.errors import ExecError
from shardwright.exec.arena import Arena, Interval, make_arena
from shardwright.exec.inplace import Sharer, Sharing
from shardwright.exec.keeping import copy_back, keep_results
from shardwright.exec.lowered import ABSENT, LoweredGraph, LoweredOp
from shardwright.exec.plan_text import format_plan
from shardwright.exec.spots import VIEW, Spot, find_spots, nbytes
from shardwright.ir.dtypes import itemsize

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


@dataclass(frozen=True)
class ExecPlan:
    """Calls on memory that is planned.

    lowered
        The graph, with the copies that the plan added; its outputs are where they are read.
    homes
        By value id.
    alias
        Output to the input (or the stored value) whose memory it took.
    renewed
        External values whose memory is written: stored values that are updated, donated inputs.
    static
        External values whose contents the caller promises not to change between runs.
    peak_bytes
        What the values in the arena take at once, at most, each in whole lines.
    """

    lowered: LoweredGraph
    homes: Mapping[int, Home]
    buffers: tuple[Buffer, ...]
    alias: Mapping[int, int]
    renewed: frozenset[int]
    static: frozenset[int]
    peak_bytes: int

    @property
    def arena_bytes(self) -> int:
        """The size of the arena."""
        return self.buffers[ARENA].nbytes

    @cached_property
    def calls(self) -> tuple[LoweredOp, ...]:
        """What is called, in order: all but views, which cost nothing, and what makes nothing."""
        return tuple(
            op
            for op in self.lowered.ops
            if op.kind_id != VIEW.id and any(self._has_elements(vid) for vid in op.out_vids)
        )

    def _has_elements(self, vid: int) -> bool:
        return vid != ABSENT and 0 not in self.lowered.values[vid].shape

    def __str__(self) -> str:
        return format_plan(self)


def make_exec_plan(
    lowered: LoweredGraph,
    *,
    donated: Mapping[int, int] | None = None,
    static: Collection[int] = (),
    outputs: Literal["arena", "caller"] = "arena",
) -> ExecPlan:
    """The plan of a lowered graph.

    ``donated`` maps inputs whose memory is given away to the outputs that are to lie there.
    ``static`` are inputs and stored values whose contents never change. With ``outputs="caller"``
    each output that is no external value has a buffer of its own.
    Raises ExecError where a promise does not fit the graph.
    """
    targets = _targets(lowered, donated or {})
    _check_static(lowered, static, targets)
    spots = find_spots(lowered.values, lowered.ops)
    graph, targets = keep_results(lowered, targets, spots)
    if graph is not lowered:
        spots = find_spots(graph.values, graph.ops)
    sharer = Sharer(graph.values, graph.ops, spots, [*graph.outputs, *targets.values()])
    sharing = sharer.share(targets)
    graph = copy_back(graph, targets, sharing, spots)
    placement = _Placement(graph, spots, sharer, sharing, outputs)
    return ExecPlan(
        graph,
        placement.homes(),
        placement.buffers,
        sharing.alias,
        frozenset(targets),
        frozenset(static),
        placement.arena.peak,
    )


# --- what the caller says --------------------------------------------------------------------


def _targets(lowered: LoweredGraph, donated: Mapping[int, int]) -> dict[int, int]:
    """External memory by the result that is to lie there; where that is so anyway, left out."""
    for vid, result in donated.items():
        if vid not in lowered.inputs or result not in lowered.outputs:
            raise ExecError(
                f"value {vid} is donated to {result}; an input is donated to an output, and the "
                f"inputs are {list(lowered.inputs)}, the outputs {list(lowered.outputs)}"
            )
    targets = {**lowered.updates, **donated}
    return {target: result for target, result in targets.items() if target != result}


def _check_static(
    lowered: LoweredGraph, static: Collection[int], targets: Mapping[int, int]
) -> None:
    made = {vid for op in lowered.ops for vid in op.out_vids}
    for vid in static:
        if vid not in lowered.values or vid in made or vid in targets:
            raise ExecError(
                f"value {vid} is to be static; only inputs and stored values are that no update "
                "replaces"
            )


# --- homes -----------------------------------------------------------------------------------


class _Placement:
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
