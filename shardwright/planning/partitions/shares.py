"""What each rank carries under an assignment of nodes to stages, kept up to date move by move.

Comes in: a workload, the stage of each node, and the rank of each stage. What always holds: the
sums are those that `Shares.of` would work out anew.

A rank carries the seconds of its nodes, those of what it receives, and those of what it sends, each
value once. It holds the stored values that its nodes read, each once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardwright.planning.partitions.workload import Sent, Workload


@dataclass(slots=True)
class Shares:
    """Sums by rank.

    ``sent`` are the seconds and ``crossing`` the bytes of all messages; ``kept`` is what a rank
    holds of one microbatch from its forward to its backward.
    """

    workload: Workload
    stages: list[int]
    ranks: Sequence[int]
    nodes: list[int]
    """How many nodes each stage has."""
    work: list[float]
    """Seconds of nodes alone."""
    seconds: list[float]
    stored: list[float]
    kept: list[float]
    sent: float
    crossing: int
    _touching: list[list[int]]
    """Which values each node makes or reads."""
    _held: list[list[int]]
    """Which stored values each node reads."""
    _readers: list[Counter[int]]
    """How many readers of each stored value a rank has."""

    @classmethod
    def of(cls, workload: Workload, stages: Sequence[int], ranks: Sequence[int]) -> Shares:
        """The shares of nodes in these stages, on these ranks."""
        count = max(ranks, default=-1) + 1
        found = cls(
            workload,
            list(stages),
            ranks,
            [0] * len(ranks),
            [0.0] * count,
            [0.0] * count,
            [0.0] * count,
            [0.0] * count,
            0.0,
            0,
            [[] for _ in stages],
            [[] for _ in stages],
            [Counter() for _ in workload.stored],
        )
        found._begin()
        return found

    def _begin(self) -> None:
        for node, stage in enumerate(self.stages):
            self.nodes[stage] += 1
            self._work(self.ranks[stage], self.workload.seconds[node])
        for number, value in enumerate(self.workload.sent):
            for node in (value.maker, *value.readers):
                self._touching[node].append(number)
            self._count(value, 1)
        for number, stored in enumerate(self.workload.stored):
            for node in stored.readers:
                self._held[node].append(number)
                self._read(number, self.rank(node), 1)

    def rank(self, node: int) -> int:
        """The rank that does a node."""
        return self.ranks[self.stages[node]]

    def move(self, node: int, stage: int) -> None:
        """Put a node in another stage."""
        before, after = self.rank(node), self.ranks[stage]
        self.nodes[self.stages[node]] -= 1
        self.nodes[stage] += 1
        if before == after:
            self.stages[node] = stage
            return
        touched = [self.workload.sent[number] for number in self._touching[node]]
        for value in touched:
            self._count(value, -1)
        self.stages[node] = stage
        for value in touched:
            self._count(value, 1)
        for number in self._held[node]:
            self._read(number, before, -1)
            self._read(number, after, 1)
        self._work(before, -self.workload.seconds[node])
        self._work(after, self.workload.seconds[node])

    def _work(self, rank: int, seconds: float) -> None:
        self.work[rank] += seconds
        self.seconds[rank] += seconds

    def _count(self, value: Sent, sign: int) -> None:
        """Add or take away what the messages of a value cost, and what is kept of it."""
        maker = self.rank(value.maker)
        self.kept[maker] += sign * value.kept
        receivers = set(self._receivers(value, maker))
        for rank in receivers:
            self.seconds[rank] += sign * value.seconds
            self.kept[rank] += sign * value.arrived
        if receivers:
            self.seconds[maker] += sign * value.seconds
        self.sent += sign * value.seconds * len(receivers)
        self.crossing += sign * value.nbytes * len(receivers)

    def _receivers(self, value: Sent, maker: int) -> Iterator[int]:
        return (rank for rank in map(self.rank, value.readers) if rank != maker)

    def _read(self, number: int, rank: int, sign: int) -> None:
        """Count a reader of a stored value; the rank holds it while it has one."""
        counts, before = self._readers[number], self._readers[number][rank]
        counts[rank] += sign
        if not before or not counts[rank]:
            self.stored[rank] += sign * self.workload.stored[number].nbytes
