"""Post-processing of partitions: an order without cycles and refinement.

`as_stages` makes stages of any parts: no node then reads what a later stage makes, every stage has
a node, and what was moved is told. Parts are numbered so that few seconds of messages would go
backwards; what does is ended by moves of nodes.

`refine` moves single nodes (Fiduccia and Mattheyses, 1982) and keeps stages acyclic (Moreira, Popp
and Schulz, "Graph Partitioning with Acyclicity Constraints", 2017): in a pass each node moves once
at most, always the one whose move is the best of all there are, even where it makes things worse;
the pass is then taken back to its best moment. Better is less work of the rank that has most, then
fewer seconds of messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import permutations

from shardwright.planning.workload import Shares, Workload

# --- from parts to stages -------------------------------------------------------------------------


MOST_ORDERS = 7
"""All orders of up to that many parts are tried."""
NAMED = 3
"""How many of the nodes that were moved a note names."""


def as_stages(workload: Workload, parts: Sequence[int], count: int) -> tuple[list[int], list[str]]:
    """Stages near to ``parts``, which are numbers below ``count``, and what had to be done."""
    order = _order(workload, parts, count)
    wanted = [order.index(part) for part in parts]
    stages, notes = without_cycles(workload, wanted)
    stages, added = without_empty(workload, stages, count)
    return stages, [*_numbered(part for part in order if part in parts), *notes, *added]


def _numbered(order: Iterable[int]) -> list[str]:
    """A note of the order of parts, where it is another than that of their numbers."""
    parts = list(order)
    text = ", ".join(map(str, parts))
    return [f"parts numbered anew, as data flows: {text}"] if parts != sorted(parts) else []


def _order(workload: Workload, parts: Sequence[int], count: int) -> list[int]:
    """The parts in an order in which few seconds go backwards."""
    flow = [[0.0] * count for _ in range(count)]
    for value in workload.sent:
        for part in {parts[reader] for reader in value.readers}:
            flow[parts[value.maker]][part] += value.seconds

    def backwards(order: Sequence[int]) -> float:
        pairs = ((a, b) for i, a in enumerate(order) for b in order[i + 1 :])
        return sum(flow[b][a] for a, b in pairs)

    places: list[list[int]] = [[] for _ in range(count)]
    for node, part in enumerate(parts):
        places[part].append(node)
    first = sorted(range(count), key=lambda part: sum(places[part]) / (len(places[part]) or 1))
    if count <= MOST_ORDERS:
        return min([first, *map(list, permutations(first))], key=backwards)
    return _swapped(first, backwards)


def _swapped(order: list[int], backwards: Callable[[Sequence[int]], float]) -> list[int]:
    """The order, neighbours exchanged while that helps."""
    best, better = backwards(order), True
    while better:
        better = False
        for i in range(len(order) - 1):
            other = [*order[:i], order[i + 1], order[i], *order[i + 2 :]]
            if (found := backwards(other)) < best:
                order, best, better = other, found, True
    return order


def without_cycles(workload: Workload, stages: Sequence[int]) -> tuple[list[int], list[str]]:
    """The stages without what needs a later one, and notes of what was moved."""
    forward, back = list(stages), list(stages)
    for node, makers in enumerate(workload.predecessors):
        forward[node] = max([forward[node], *(forward[maker] for maker in makers)])
    if forward == back:
        return forward, []
    for node in reversed(range(len(stages))):
        back[node] = min([back[node], *(back[reader] for reader in workload.successors[node])])
    candidates = (forward, back, _rising(workload, stages))
    best = min(candidates, key=lambda found: _badness(workload, found, max(stages, default=0)))
    return best, _moved(workload, stages, best)


def _rising(workload: Workload, stages: Sequence[int]) -> list[int]:
    """The stages that never go back along the order of nodes and leave most work where it is."""
    count = max(stages, default=0) + 1
    best = [0.0] * count
    came: list[list[int]] = []
    for wanted, seconds in zip(stages, workload.seconds, strict=True):
        origins = _least_up_to(best)
        best = [best[at] + (stage != wanted) * seconds for stage, at in enumerate(origins)]
        came.append(origins)
    found, at = [], min(range(count), key=best.__getitem__)
    for origins in reversed(came):
        found.append(at)
        at = origins[at]
    return found[::-1]


def _least_up_to(costs: Sequence[float]) -> list[int]:
    """For each place the place of the smallest cost up to there."""
    found: list[int] = []
    for place, cost in enumerate(costs):
        found.append(found[-1] if found and costs[found[-1]] <= cost else place)
    return found


def _badness(workload: Workload, stages: Sequence[int], last: int) -> tuple[float, float]:
    shares = Shares.of(workload, stages, range(last + 1))
    return max(shares.seconds, default=0.0), shares.sent


def _moved(workload: Workload, before: Sequence[int], after: Sequence[int]) -> list[str]:
    """A note for each pair of stages between which nodes were moved."""
    pairs: dict[tuple[int, int], list[int]] = {}
    for node, pair in enumerate(zip(before, after, strict=True)):
        if pair[0] != pair[1]:
            pairs.setdefault(pair, []).append(node)
    return [
        f"moved {named(workload, nodes)} from stage {a} to stage {b}: they needed each other"
        for (a, b), nodes in pairs.items()
    ]


def moved_note(
    workload: Workload, before: Sequence[int], after: Sequence[int], why: str
) -> list[str]:
    """A note of the nodes that are in another stage than before, where there are any."""
    moved = [
        node for node, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1]
    ]
    return [f"moved {named(workload, moved)} {why}"] if moved else []


def named(workload: Workload, nodes: Sequence[int]) -> str:
    """How many nodes, and the names of the first: ``2 nodes (layers.0: add, layers.1: add)``."""
    names = ", ".join(workload.names[node] for node in nodes[:NAMED])
    more = ", …" if len(nodes) > NAMED else ""
    return f"{len(nodes)} node{'s' if len(nodes) > 1 else ''} ({names}{more})"


def without_empty(
    workload: Workload, stages: Sequence[int], count: int
) -> tuple[list[int], list[str]]:
    """The stages numbered without gaps, the largest cut in two until there are ``count``."""
    used = sorted(set(stages))
    found = [used.index(stage) for stage in stages]
    notes = []
    for number in range(len(used), count):
        found = _halved(workload, found, number)
        notes.append(f"cut a stage in two: only {number} of {count} stages had nodes")
    return found, notes


def _halved(workload: Workload, stages: Sequence[int], count: int) -> list[int]:
    """One stage more: of those with two nodes or more the one of most seconds, cut in half."""
    members: list[list[int]] = [[] for _ in range(count)]
    for node, stage in enumerate(stages):
        members[stage].append(node)

    def seconds(nodes: Sequence[int]) -> float:
        return sum(workload.seconds[node] for node in nodes)

    chosen = max(
        (s for s in range(count) if len(members[s]) > 1), key=lambda s: seconds(members[s])
    )
    nodes = members[chosen]
    half = min(range(1, len(nodes)), key=lambda at: abs(2 * seconds(nodes[:at]) - seconds(nodes)))
    late = set(nodes[half:])
    return [stage + (stage > chosen or node in late) for node, stage in enumerate(stages)]


# --- refinement -----------------------------------------------------------------------------------


PASSES = 4
PATIENCE = 40
"""A pass ends after that many moves without a better moment."""
NEARLY = 1e-12
"""Differences smaller than that, relatively, are of rounding."""

Merit = tuple[float, float]
"""Smaller is better."""


def refine(workload: Workload, stages: Sequence[int], allowed: float = 0.0) -> list[int]:
    """Stages that are no worse than ``stages``, which are numbered in the order of the forward.

    Work up to ``allowed`` is as good as less.
    """
    shares = Shares.of(workload, stages, range(max(stages, default=-1) + 1))
    refining = _Refining(shares, allowed)
    for _ in range(PASSES):
        if not refining.run():
            break
    return refining.shares.stages


class _Refining:
    """Passes over one partition, which is in ``shares``."""

    def __init__(self, shares: Shares, allowed: float) -> None:
        self.shares = shares
        self._allowed = allowed
        self._targets: dict[int, list[int]] = {}
        for node in range(len(shares.stages)):
            self._look_at(node)

    def run(self) -> bool:
        """A pass; whether it made anything better."""
        first = best = self._merit()
        locked: set[int] = set()
        moves: list[tuple[int, int]] = []
        kept = 0
        while len(moves) - kept < PATIENCE:
            found = min(self._moves(locked), default=None)
            if found is None:
                break
            merit, node, stage = found
            moves.append((node, self.shares.stages[node]))
            self._move(node, stage)
            locked.add(node)
            if _better(merit, best):
                best, kept = merit, len(moves)
        for node, stage in reversed(moves[kept:]):
            self._move(node, stage)
        return _better(best, first)

    def _merit(self) -> Merit:
        return max(self._allowed, *self.shares.work), self.shares.sent

    def _moves(self, locked: set[int]) -> Iterator[tuple[Merit, int, int]]:
        """Every move there is, with what it leads to."""
        shares = self.shares
        for node, targets in self._targets.items():
            stage = shares.stages[node]
            if node in locked or shares.nodes[stage] < 2:
                continue
            for target in targets:
                shares.move(node, target)
                yield self._merit(), node, target
                shares.move(node, stage)

    def _move(self, node: int, stage: int) -> None:
        """Move a node; others may go elsewhere because of it."""
        self.shares.move(node, stage)
        workload = self.shares.workload
        for other in (node, *workload.predecessors[node], *workload.successors[node]):
            self._look_at(other)

    def _look_at(self, node: int) -> None:
        """Note the stages that a node could be in, all others left where they are.

        Of many those next to its own, the first and the last.
        """
        workload, stages = self.shares.workload, self.shares.stages
        low = max((stages[maker] for maker in workload.predecessors[node]), default=0)
        last = len(self.shares.nodes) - 1
        high = min((stages[reader] for reader in workload.successors[node]), default=last)
        near = {low, stages[node] - 1, stages[node] + 1, high} - {stages[node]}
        targets = sorted(stage for stage in near if low <= stage <= high)
        if targets:
            self._targets[node] = targets
        else:
            self._targets.pop(node, None)


def _better(one: Merit, other: Merit) -> bool:
    """Whether a merit is smaller, by more than rounding."""
    for a, b in zip(one, other, strict=True):
        if abs(a - b) > NEARLY * max(abs(a), abs(b)):
            return a < b
    return False
