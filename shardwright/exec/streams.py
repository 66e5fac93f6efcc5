"""Streams: which calls run beside others, and who waits for whom.

Comes in: who makes and reads what, an order, and how many streams there may be. Goes out: a stream
for each call, and the calls that it waits for. Stream 0 is the one that a run is asked for on; runs
begin and end there, and without more than one stream all calls are on it.

A call runs beside those that follow, on another stream, where what it makes is not read by the next
one. Stream 0 waits for it before what reads it, and at the latest after `WINDOW` calls, since what
it reads and makes keeps its memory until then. What always holds: the plan's order is one that the
streams allow, and calls that are ordered are all on stream 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.exec.order import Uses

WINDOW = 8
"""How many calls stream 0 makes at most before it waits for one that runs beside them."""


@dataclass(frozen=True, slots=True)
class Span:
    """When a call may run, by places in the order, both included.

    On stream 0 that is its own place. Elsewhere it is from behind the last call of stream 0 that it
    waits for to the first one there that waits for it.
    """

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Streams:
    """By place in the order: the stream of a call, and the places of what it waits for."""

    of: tuple[int, ...]
    waits: tuple[tuple[int, ...], ...]
    spans: tuple[Span, ...]

    def ended_by(self, count: int) -> Streams:
        """With so many more calls at the end, on stream 0 when all others are over."""
        if not count:
            return self
        last = {stream: place for place, stream in enumerate(self.of) if stream}
        more = range(len(self.of), len(self.of) + count)
        waits = [tuple(sorted(last.values())), *[()] * (count - 1)]
        return Streams(
            (*self.of, *[0] * count),
            (*self.waits, *waits),
            (*self.spans, *(Span(place, place) for place in more)),
        )


def one_stream(count: int) -> Streams:
    """All calls one after the other."""
    return Streams((0,) * count, ((),) * count, tuple(Span(k, k) for k in range(count)))


def find_streams(uses: Uses, order: Sequence[int], count: int) -> Streams:
    """The streams of an order; ``count`` is how many there may be."""
    if count == 1:
        return one_stream(len(order))
    places = {number: place for place, number in enumerate(order)}
    read = [_first_reader(uses, number, places) for number in order]
    of = _assigned(uses, order, read, count)
    joins = [_join(place, read[place], of) for place in range(len(order))]
    waits: list[set[int]] = [set() for _ in order]
    for place, number in enumerate(order):
        for root in uses.reads[number]:
            if root in uses.makers:
                waits[place].add(places[uses.makers[root]])
        if of[place] and joins[place] < len(order):
            waits[joins[place]].add(place)
    latest = tuple(_latest(place, waits[place], of) for place in range(len(order)))
    return Streams(tuple(of), latest, _spans(of, latest, joins))


def _first_reader(uses: Uses, number: int, places: dict[int, int]) -> int:
    """The place of the first call that reads what a call makes; past the end where none does."""
    made = uses.ops[number].out_vids
    readers = [places[k] for vid in made for k in uses.readers.get(vid, ())]
    return min(readers, default=len(places))


def _assigned(uses: Uses, order: Sequence[int], read: Sequence[int], count: int) -> list[int]:
    """Each call's stream: those that run beside others take turns on the streams from 1 on."""
    of, beside = [], 0
    for place, number in enumerate(order):
        alone = read[place] <= place + 1 or place == len(order) - 1
        if alone or uses.ops[number].must("ordered"):
            of.append(0)
        else:
            of.append(1 + beside % (count - 1))
            beside += 1
    return of


def _join(place: int, read: int, of: Sequence[int]) -> int:
    """The first call of stream 0 that waits for a call; past the end where none does."""
    at = min(read, place + WINDOW)
    return next((k for k in range(at, len(of)) if of[k] == 0), len(of))


def _latest(place: int, waits: set[int], of: Sequence[int]) -> tuple[int, ...]:
    """The last call of each other stream among those that a call waits for."""
    last: dict[int, int] = {}
    for other in waits:
        if of[other] != of[place]:
            last[of[other]] = max(other, last.get(of[other], -1))
    return tuple(sorted(last.values()))


def _spans(
    of: Sequence[int], waits: Sequence[tuple[int, ...]], joins: Sequence[int]
) -> tuple[Span, ...]:
    """When each call may run, by what it and those before it on its stream wait for."""
    since = [-1] * len(of)
    last: dict[int, int] = {}
    for place, stream in enumerate(of):
        behind = [since[last[stream]]] if stream in last else []
        behind += [other if of[other] == 0 else since[other] for other in waits[place]]
        since[place] = max(behind, default=-1)
        last[stream] = place
    return tuple(
        Span(since[place] + 1, joins[place]) if stream else Span(place, place)
        for place, stream in enumerate(of)
    )
