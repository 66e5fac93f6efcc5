"""The order of calls: as the graph has them, but for those that are better made later.

Comes in: a lowered graph, its spots, and its targets, external memory by the value that is to lie
there after a run. Goes out: the numbers of the graph's calls, in turn; views, which are none, are
left out. What always holds: every value is made before it is read, what reads a target's old
contents stays before the call that makes the new ones, and calls that are ordered stay where they
are.

A call moves down to just before the first one that reads what it makes. It does so where a hint
asks for it, and where what it makes would lie there unread while most memory is needed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from shardwright.compiler.arena import align
from shardwright.ir.tensor_meta import itemsize
from shardwright.kernels.lowered import ABSENT, LoweredGraph, LoweredOp, ValueSpec
from shardwright.kernels.spots import VIEW, Spot, extent, results, saved

NEAR_THE_PEAK = 0.95
"""How much of the peak counts as most memory."""
ROUNDS = 4
"""How often calls are moved out of the way of a peak, which may then be elsewhere."""

Order = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Uses:
    """Who makes and reads what, by call number; sizes in whole lines of the arena.

    reads
        Roots by call.
    makers, readers
        Calls by root.
    kept
        Roots that are needed when all calls have run.
    limits
        For external roots with new contents, the call that makes these.
    """

    ops: Sequence[LoweredOp]
    reads: Mapping[int, Collection[int]]
    makers: Mapping[int, int]
    readers: Mapping[int, Sequence[int]]
    sizes: Mapping[int, int]
    kept: Collection[int]
    limits: Mapping[int, int]


def find_uses(graph: LoweredGraph, spots: Mapping[int, Spot], targets: Mapping[int, int]) -> Uses:
    """The uses of a graph's roots."""
    reads: dict[int, Collection[int]] = {}
    makers: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    for number, op in enumerate(graph.ops):
        if op.kind_id == VIEW.id:
            continue
        makers.update((vid, number) for vid in op.out_vids if vid != ABSENT)
        reads[number] = {spots[vid].root for vid in op.in_vids if vid != ABSENT}
        for root in reads[number]:
            readers.setdefault(root, []).append(number)
    sizes = {root: align(_nbytes(graph.values[root], spots[root])) for root in makers}
    kept = {spots[vid].root for vid in (*results(graph), *targets.values(), *saved(graph.ops))}
    limits = {
        target: makers[spots[result].root]
        for target, result in targets.items()
        if spots[result].root in makers
    }
    return Uses(graph.ops, reads, makers, readers, sizes, kept, limits)


def _nbytes(spec: ValueSpec, spot: Spot) -> int:
    return extent(spot.shape, spot.strides) * itemsize(spec.dtype)


def hinted_order(uses: Uses) -> Order:
    """The graph's order, with calls made late that are hinted to be."""
    late = [k for k, op in enumerate(uses.ops) if "late" in op.hints]
    return _Sinking(uses, _given(uses)).sink(late) if late else _given(uses)


def lighter_order(uses: Uses, order: Order) -> Order:
    """An order that needs less memory at once; the one that is given where none was found."""
    live = _live(uses, order)
    for _ in range(ROUNDS):
        waiting = list(_waiting(uses, order, live))
        if not waiting:
            break
        other = _Sinking(uses, order).sink(waiting, only_lighter=True)
        found = _live(uses, other)
        if max(found) >= max(live):
            break
        order, live = other, found
    return order


def _given(uses: Uses) -> Order:
    return tuple(k for k, op in enumerate(uses.ops) if op.kind_id != VIEW.id)


# --- what waits ------------------------------------------------------------------------------


def _live(uses: Uses, order: Order) -> list[int]:
    """Bytes of what is made and still to be read, at each call."""
    places = {number: place for place, number in enumerate(order)}
    change = [0] * (len(order) + 1)
    for root, maker in uses.makers.items():
        last = max((places[k] for k in uses.readers.get(root, ())), default=places[maker])
        change[places[maker]] += uses.sizes[root]
        if root not in uses.kept:
            change[last + 1] -= uses.sizes[root]
    return list(accumulate(change[:-1]))


def _waiting(uses: Uses, order: Order, live: Sequence[int]) -> Iterator[int]:
    """The calls whose results nobody reads until most memory is needed, and has been."""
    most = NEAR_THE_PEAK * max(live, default=0)
    peaks = [place for place, count in enumerate(live) if count >= most]
    places = {number: place for place, number in enumerate(order)}
    for place, number in enumerate(order):
        read = [places[k] for k in _readers(uses, number)]
        found = bisect_left(peaks, place + 1)
        if read and found < len(peaks) and peaks[found] < min(read):
            yield number


def _readers(uses: Uses, number: int) -> list[int]:
    """The calls that read what a call makes."""
    made = (vid for vid in uses.ops[number].out_vids if vid != ABSENT)
    return [reader for vid in made for reader in uses.readers.get(vid, ())]


# --- moving ----------------------------------------------------------------------------------


class _Sinking:
    """Puts calls in their new order, the last one first."""

    def __init__(self, uses: Uses, order: Order) -> None:
        self._uses = uses
        self._order = order
        self._label: dict[int, Fraction | int] = {}
        """Grows along the new order."""
        self._before: dict[int, int] = {}
        """By call, the one before it in the new order, as far as that is known."""

    def sink(self, moved: Collection[int], *, only_lighter: bool = False) -> Order:
        """The order with these calls moved down, where they may be.

        With ``only_lighter``, where what they make is more than what they keep waiting.
        """
        movable = set(moved)
        front = -1
        for place in range(len(self._order) - 1, -1, -1):
            number = self._order[place]
            reader = self._goal(number, only_lighter=only_lighter) if number in movable else front
            if reader in (front, -1):
                self._label[number] = place
                if front >= 0:
                    self._before[front] = number
                front = number
            else:
                self._insert(number, reader)
        return tuple(sorted(self._order, key=lambda number: self._label[number]))

    def _insert(self, number: int, reader: int) -> None:
        """Put a call just before another one, which something stands before."""
        before = self._before[reader]
        self._label[number] = Fraction(self._label[before] + self._label[reader]) / 2
        self._before[number], self._before[reader] = before, number

    def _goal(self, number: int, *, only_lighter: bool) -> int:
        """The call that this one is to stand before; -1 where it stays."""
        op, uses = self._uses.ops[number], self._uses
        readers = _readers(uses, number)
        if not readers or op.must("ordered") or "early" in op.hints:
            return -1
        first = min(readers, key=lambda k: self._label[k])
        goal = self._label[first]
        if any(self._is_passed(uses.limits.get(root), goal) for root in uses.reads[number]):
            return -1
        made = sum(uses.sizes[vid] for vid in op.out_vids if vid != ABSENT)
        return first if made > self._held(number, goal) or not only_lighter else -1

    def _is_passed(self, maker: int | None, goal: Fraction | int) -> bool:
        """Whether a call would move past one that writes over what it reads."""
        return maker is not None and self._label.get(maker, goal) < goal

    def _held(self, number: int, goal: Fraction | int) -> int:
        """Bytes that are read last by this call, or between it and its goal."""
        return sum(
            self._uses.sizes[root]
            for root in self._uses.reads[number]
            if root in self._uses.makers
            and root not in self._uses.kept
            and all(self._label.get(k, -1) < goal for k in self._uses.readers[root])
        )
