"""The exact cut of a sequence into contiguous stages.

`Loads` answers what a stage from node i to node j would carry; `cut` finds the positions that
minimise, first, the largest load of any stage and then, among all cuts whose stages stay within
`SLACK` of that, the bytes that cross. Both are dynamic programs over all positions; a load never
shrinks when a stage grows, which makes them O(stages · n log n).

The load of a stage is the larger of two shares: its share of the work, and its share of the
stored bytes, each as a fraction of the whole graph's. A stage so bounded is neither the slowest
by far nor the fullest by far.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

from shardwright.ir import IRGraph
from shardwright.planning.cost import node_work

SLACK = 1.05
"""A cut may exceed the smallest largest load by this factor where fewer bytes cross."""


@dataclass(frozen=True, slots=True)
class Loads:
    """Prefix sums over the nodes of a graph.

    A stored value that several nodes read counts once in a stage, so those values stand apart
    from the prefix sums, with the positions that read them.
    """

    work: list[int]
    single: list[int]
    shared: list[tuple[int, list[int]]]
    total_work: int
    total_bytes: int
    extra: int = 0
    """Bytes that every stage holds whatever its nodes are."""
    fullness: float = 1.0
    """How much a share of the stored bytes counts against one of the work."""

    def after(self, first: int) -> Loads:
        """The same without the first nodes."""
        shared = [(n, [at - first for at in found if at >= first]) for n, found in self.shared]
        return replace(self, work=self.work[first:], single=self.single[first:], shared=shared)

    def stored_bytes(self, start: int, stop: int) -> int:
        """Bytes of parameters, buffers and constants that nodes start..stop-1 read."""
        found = self.single[stop] - self.single[start]
        for size, positions in self.shared:
            at = bisect_left(positions, start)
            found += size if at < len(positions) and positions[at] < stop else 0
        return found

    def load(self, start: int, stop: int) -> float:
        """The larger share, of work or of stored bytes, of nodes start..stop-1."""
        stored = self.stored_bytes(start, stop) + self.extra
        work = self.work[stop] - self.work[start]
        return max(work / self.total_work, self.fullness * stored / self.total_bytes)


def measure_loads(graph: IRGraph, held: Mapping[int, int] | None = None) -> Loads:
    """Work and stored bytes of every node of a graph.

    ``held`` says what stands for the bytes of stored values of which that is not their own.
    """
    held = held or {}
    position = {node.id: i for i, node in enumerate(graph.nodes)}
    work = list(accumulate((node_work(graph, node) for node in graph.nodes), initial=0))
    single = [0] * len(graph.nodes)
    shared = []
    for value in graph.stored():
        nbytes = held.get(value.id, value.nbytes)
        if len(value.users) == 1:
            single[position[value.users[0]]] += nbytes
        elif value.users:
            shared.append((nbytes, [position[user] for user in value.users]))
    prefix = list(accumulate(single, initial=0))
    total = prefix[-1] + sum(size for size, _ in shared)
    return Loads(work, prefix, shared, max(work[-1], 1), max(total, 1))


def cut(loads: Loads, stages: int, crossing: Sequence[int], slack: float = SLACK) -> list[int]:
    """Positions 0 = c0 < c1 < … < cN = n: stage k runs the nodes from c(k) to c(k+1)-1.

    ``crossing`` is `crossing_bytes` of the graph; the largest load may exceed the smallest that
    there can be by the factor ``slack``.
    """
    bound = smallest_bound(loads, stages) * slack
    return _fewest_bytes(loads, stages, crossing, bound)


def smallest_bound(loads: Loads, stages: int) -> float:
    """The smallest possible largest load of any stage."""
    n = len(loads.work) - 1
    best = [loads.load(0, stop) for stop in range(n + 1)]
    for stage in range(1, stages):
        best = [float("inf")] * stage + [
            _best_split(loads, best, stage, stop) for stop in range(stage, n + 1)
        ]
    return best[n]


def _best_split(loads: Loads, best: Sequence[float], stage: int, stop: int) -> float:
    """min over start of max(best[start], load(start, stop)); one rises with start, one falls."""
    low, high = stage, stop - 1
    while low < high:
        middle = (low + high) // 2
        if best[middle] >= loads.load(middle, stop):
            high = middle
        else:
            low = middle + 1
    candidates = (start for start in (low - 1, low) if stage <= start < stop)
    return min(
        (max(best[start], loads.load(start, stop)) for start in candidates),
        default=float("inf"),
    )


def _fewest_bytes(loads: Loads, stages: int, crossing: Sequence[int], bound: float) -> list[int]:
    """The cut of fewest crossing bytes whose stages all stay within ``bound``."""
    n = len(loads.work) - 1
    cost = [0.0 if loads.load(0, stop) <= bound else float("inf") for stop in range(n + 1)]
    cost[0] = float("inf")
    choices: list[list[int]] = []
    for _ in range(1, stages):
        cost, choice = _extend(cost, crossing, partial(_fits, loads, bound))
        choices.append(choice)
    cuts = [n]
    for choice in reversed(choices):
        cuts.append(choice[cuts[-1]])
    return [0, *reversed(cuts)]


def _fits(loads: Loads, bound: float, start: int, stop: int) -> bool:
    return loads.load(start, stop) <= bound


def _extend(
    cost: Sequence[float], crossing: Sequence[int], fits: Callable[[int, int], bool]
) -> tuple[list[float], list[int]]:
    """One stage more: for each stop, the cheapest start from which the stage fits.

    The starts that fit are a window that moves right with stop, so a queue with its smallest
    cost in front answers each stop in constant time.
    """
    result, choice = [float("inf")] * len(cost), [0] * len(cost)
    window: deque[tuple[float, int]] = deque()
    for stop in range(1, len(cost)):
        entering = cost[stop - 1] + crossing[stop - 1]
        while window and window[-1][0] > entering:
            window.pop()
        window.append((entering, stop - 1))
        while window and not fits(window[0][1], stop):
            window.popleft()
        if window:
            result[stop], choice[stop] = window[0]
    return result, choice
