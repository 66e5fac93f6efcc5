"""Peak-memory scheduling by sinking: the graph's order, but for calls that are better made later.

A call moves down to just before the first one that reads what it makes. It does so where a hint
asks for it, and where what it makes would be held unread while most memory is needed. In the order
that comes out every value is made before it is read, what reads a target's old contents stays
before the call that makes the new ones, and calls that are ordered stay where they are; views,
which are no calls, are left out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from shardwright.compiler.memory.arena import align
from shardwright.kernels.lowered import VIEW, BaseView, LoweredGraph, LoweredOp

NEAR_THE_PEAK = 0.95
"""How much of the peak counts as most memory."""
ROUNDS = 4
"""How often calls are moved out of the way of a peak, which may then be elsewhere."""

CallOrder = tuple[int, ...]
"""Numbers of a graph's calls, in turn."""


@dataclass(frozen=True, slots=True)
class BaseUses:
    """Who makes and reads what, by call number; sizes in whole lines of the arena.

    reads
        Bases by call.
    makers, readers
        Calls by base.
    kept
        Bases that are needed when all calls have run.
    limits
        For external bases with new contents, the call that makes these.
    """

    ops: Sequence[LoweredOp]
    reads: Mapping[int, Collection[int]]
    makers: Mapping[int, int]
    readers: Mapping[int, Sequence[int]]
    sizes: Mapping[int, int]
    kept: Collection[int]
    limits: Mapping[int, int]

    def readers_of(self, number: int) -> list[int]:
        """The calls that read what a call makes."""
        return [reader for vid in self.ops[number].makes for reader in self.readers.get(vid, ())]


def find_uses(
    graph: LoweredGraph, bases: Mapping[int, BaseView], targets: Mapping[int, int]
) -> BaseUses:
    """The uses of a graph's bases; ``targets``: external memory by the value that it is to hold."""
    reads: dict[int, Collection[int]] = {}
    makers: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    for number, op in enumerate(graph.ops):
        if op.kind_id == VIEW.id:
            continue
        makers.update((vid, number) for vid in op.makes)
        reads[number] = {bases[vid].base for vid in op.reads}
        for base in reads[number]:
            readers.setdefault(base, []).append(number)
    sizes = {base: align(graph.values[base].nbytes) for base in makers}
    kept = {bases[vid].base for vid in (*graph.kept, *targets.values())}
    limits = {
        target: makers[bases[result].base]
        for target, result in targets.items()
        if bases[result].base in makers
    }
    return BaseUses(graph.ops, reads, makers, readers, sizes, kept, limits)


def hinted_order(uses: BaseUses) -> CallOrder:
    """The graph's order, with calls made late that are hinted to be."""
    given = tuple(k for k, op in enumerate(uses.ops) if op.kind_id != VIEW.id)
    late = [k for k, op in enumerate(uses.ops) if "late" in op.hints]
    return _sink(uses, given, late) if late else given


def lighter_order(uses: BaseUses, order: CallOrder) -> CallOrder:
    """An order that needs less memory at once; the one that is given where none was found."""
    live = _live_bytes(uses, order)
    for _ in range(ROUNDS):
        waiting = list(_waiting(uses, order, live))
        if not waiting:
            break
        other = _sink(uses, order, waiting, only_lighter=True)
        found = _live_bytes(uses, other)
        if max(found) >= max(live):
            break
        order, live = other, found
    return order


def _live_bytes(uses: BaseUses, order: CallOrder) -> list[int]:
    """Bytes of what is made and still to be read, at each call."""
    places = {number: place for place, number in enumerate(order)}
    change = [0] * (len(order) + 1)
    for base, maker in uses.makers.items():
        last = max((places[k] for k in uses.readers.get(base, ())), default=places[maker])
        change[places[maker]] += uses.sizes[base]
        if base not in uses.kept:
            change[last + 1] -= uses.sizes[base]
    return list(accumulate(change[:-1]))


def _waiting(uses: BaseUses, order: CallOrder, live: Sequence[int]) -> Iterator[int]:
    """The calls whose results nobody reads until most memory is needed, and has been."""
    most = NEAR_THE_PEAK * max(live, default=0)
    peaks = [place for place, count in enumerate(live) if count >= most]
    places = {number: place for place, number in enumerate(order)}
    for place, number in enumerate(order):
        read = [places[k] for k in uses.readers_of(number)]
        found = bisect_left(peaks, place + 1)
        if read and found < len(peaks) and peaks[found] < min(read):
            yield number


def _sink(
    uses: BaseUses, order: CallOrder, moved: Collection[int], *, only_lighter: bool = False
) -> CallOrder:
    """The order with these calls moved down to their first reader, where they may be.

    With ``only_lighter``, where what they make is more than what they keep waiting.
    """
    movable = set(moved)
    last_first: list[int] = []
    places: dict[int, int] = {}
    for number in reversed(order):
        reader = _goal(uses, number, places, only_lighter) if number in movable else None
        if reader is None or reader + 1 == len(last_first):
            places[number] = len(last_first)
            last_first.append(number)
        else:
            last_first.insert(reader + 1, number)
            places = {later: place for place, later in enumerate(last_first)}
    return tuple(reversed(last_first))


def _goal(uses: BaseUses, number: int, places: Mapping[int, int], only_lighter: bool) -> int | None:
    """The place of the call that this one is to stand before; None where it stays.

    ``places`` are those of later calls, counted from the end.
    """
    op, readers = uses.ops[number], uses.readers_of(number)
    if not readers or op.must("ordered") or "early" in op.hints:
        return None
    goal = max(places[reader] for reader in readers)
    limits = (uses.limits.get(base) for base in uses.reads[number])
    if any(maker is not None and places.get(maker, goal) > goal for maker in limits):
        return None  # past a call that writes over what it reads
    held = sum(
        uses.sizes[base]
        for base in uses.reads[number]
        if base in uses.makers
        and base not in uses.kept
        and all(places.get(reader, goal + 1) > goal for reader in uses.readers[base])
    )
    made = sum(uses.sizes[vid] for vid in op.makes)
    return goal if made > held or not only_lighter else None
