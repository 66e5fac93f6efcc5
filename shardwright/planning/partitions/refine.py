"""Refinement: moves of single nodes that keep the stages acyclic (Fiduccia and Mattheyses, 1982).

In a pass each node moves once at most, always the one whose move is the best of all
there are, even where it makes things worse; the pass is then taken back to its best moment. So a
group of nodes can go over together where none of them would go alone. What always holds: no node
reads what a later stage makes (Moreira, Popp and Schulz, "Graph Partitioning with Acyclicity
Constraints", 2017), and no stage is left without a node.

Better is less work of the rank that has most, then fewer seconds of messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardwright.planning.partitions.workload import Shares, Workload

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
