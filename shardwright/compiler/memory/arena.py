"""Offset assignment in an arena: where memory is that lives for a while.

A live range is from the first call that needs memory to the last, both included, with a size in
bytes. Two ranges that have a call in common do not overlap in memory; offsets are multiples of
`ALIGNMENT`.

Best fit, in several orders, of which the smallest arena is taken: each range is placed in the
smallest hole between those that live at the same time. First in order of time, which is often
nearly exact; where that takes more than the peak, what lives at the peak comes first, which is then
packed as tightly as can be, and the rest where that leaves room; then the largest, and in turn what
lay highest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

ALIGNMENT = 64
TIGHT = 1.001
"""How many times the peak an arena of few intervals may take for no other order to be tried."""
FEW = 1000
"""Of more intervals an order takes long to try."""
GOOD_ENOUGH = 1.01
"""How many times the peak, of many intervals; and of few for none to be tried that seldom helps."""
PROMOTIONS = 8
"""How often what lies highest is placed first, as long as the arena is not good enough."""


class LiveRange(NamedTuple):
    """Memory that is needed from call ``start`` to call ``end``, both included."""

    start: int
    end: int
    size: int


class ArenaLayout(NamedTuple):
    """Offsets in the intervals' order; ``peak`` is what lives at once, at most."""

    offsets: tuple[int, ...]
    size: int
    peak: int


Placed = tuple[list[int], int]
"""Offsets, and where the highest interval ends."""


def make_arena(intervals: Sequence[LiveRange]) -> ArenaLayout:
    """Where each interval lies."""
    aligned = [LiveRange(i.start, i.end, align(i.size)) for i in intervals]
    peak = peak_bytes(aligned)
    enough = (TIGHT if len(aligned) <= FEW else GOOD_ENOUGH) * peak
    best = _in_order(aligned, _sorted(range(len(aligned)), aligned, _first))
    for order in _at_the_peak_first(aligned):
        if best[1] <= enough:
            break
        best = min(best, _in_order(aligned, order), key=_size)
    order = _sorted(range(len(aligned)), aligned, _largest)
    for _ in range(1 + PROMOTIONS):
        if best[1] <= GOOD_ENOUGH * peak:
            break
        found = _in_order(aligned, order)
        best = min(best, found, key=_size)
        highest = max(order, key=lambda k: found[0][k] + aligned[k].size)
        order.remove(highest)
        order.insert(0, highest)
    return ArenaLayout(tuple(best[0]), best[1], peak)


def align(size: int) -> int:
    """The size rounded up to whole lines."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def peak_bytes(intervals: Sequence[LiveRange]) -> int:
    """How many bytes live at once, at most."""
    return int(_living(intervals).max(initial=0))


def _living(intervals: Sequence[LiveRange]) -> np.ndarray:
    """How many bytes live while each call runs."""
    change = np.zeros(max((i.end for i in intervals), default=-1) + 2, dtype=np.int64)
    np.add.at(change, [i.start for i in intervals], [i.size for i in intervals])
    np.add.at(change, [i.end + 1 for i in intervals], [-i.size for i in intervals])
    return np.cumsum(change)


# --- orders ------------------------------------------------------------------------------------


def _largest(interval: LiveRange) -> tuple[int, int]:
    return -interval.size, interval.start


def _largest_and_longest(interval: LiveRange) -> tuple[int, int]:
    return -interval.size * (interval.end - interval.start + 1), interval.start


def _longest(interval: LiveRange) -> tuple[int, int]:
    return interval.start - interval.end, -interval.size


def _first(interval: LiveRange) -> tuple[int, int]:
    return interval.start, -interval.size


Key = Callable[[LiveRange], tuple[int, int]]
_AT_THE_PEAK: tuple[tuple[Key, Key], ...] = (
    (_longest, _largest),
    (_first, _largest_and_longest),
    (_first, _largest),
    (_longest, _longest),
    (_largest, _largest),
)
"""How to order what lives at the peak, and how all else."""


def _at_the_peak_first(intervals: Sequence[LiveRange]) -> Iterator[list[int]]:
    """Orders in which what lives at the peak comes before all else."""
    fullest = int(_living(intervals).argmax())
    at_peak, others = list[int](), list[int]()
    for k, interval in enumerate(intervals):
        (at_peak if interval.start <= fullest <= interval.end else others).append(k)
    for here, elsewhere in _AT_THE_PEAK:
        yield [*_sorted(at_peak, intervals, here), *_sorted(others, intervals, elsewhere)]


def _size(placed: Placed) -> int:
    return placed[1]


def _sorted(numbers: Iterable[int], intervals: Sequence[LiveRange], key: Key) -> list[int]:
    return sorted(numbers, key=lambda k: key(intervals[k]))


def _in_order(intervals: Sequence[LiveRange], order: Sequence[int]) -> Placed:
    """Offsets and size, the intervals placed in this order."""
    count = len(intervals)
    offsets, top = [0] * count, 0
    starts, ends, begins, stops = (np.zeros(count, dtype=np.int64) for _ in range(4))
    for placed, k in enumerate(order):
        start, end, size = intervals[k]
        meets = (starts[:placed] <= end) & (ends[:placed] >= start)
        offset = _smallest_hole(begins[:placed][meets], stops[:placed][meets], size)
        starts[placed], ends[placed] = start, end
        begins[placed], stops[placed] = offset, offset + size
        offsets[k], top = offset, max(top, offset + size)
    return offsets, top


def _smallest_hole(begins: np.ndarray, stops: np.ndarray, size: int) -> int:
    """The offset of the smallest hole of this size between blocks, or behind the last one."""
    if not size or not len(begins):
        return 0
    order = np.argsort(begins, kind="stable")
    begins, reached = begins[order], np.maximum.accumulate(stops[order])
    holes = begins - np.concatenate(([0], reached[:-1]))
    fitting = np.flatnonzero(holes >= size)
    if not len(fitting):
        return int(reached[-1])
    best = fitting[np.argmin(holes[fitting])]
    return int(reached[best - 1]) if best else 0
