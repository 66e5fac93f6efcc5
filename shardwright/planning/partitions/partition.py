"""Partition: in which stage each node of a forward is, and how well that shares out the work.

Every partitioner gives one. What always holds: stages are numbered in the order in which they can
be done, so that no node reads what a later stage makes; every stage has a node; and a stage's rank
is the pipeline rank that has it, of ``replicas`` slots that share its microbatches' rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shardwright.ir.quantities import count_text
from shardwright.planning.copies import Copy
from shardwright.planning.partitions.shares import Shares
from shardwright.planning.partitions.workload import Workload


class Share(msgspec.Struct, frozen=True):
    """What a stage has: nodes, seconds of a microbatch with its messages, bytes that it holds."""

    nodes: int
    seconds: float
    stored_bytes: int


class Partition(msgspec.Struct, frozen=True):
    """The stage of each node.

    stages
        By position in the forward (`forward_view`).
    ranks, replicas
        The pipeline rank of each stage, and how many slots each rank has.
    shares
        What each stage has.
    crossing
        Bytes that cross from stage to stage for one microbatch, gradients included.
    copies
        Nodes that other stages do again instead of receiving what they make.
    notes
        In words, what was decided or mended.
    """

    graph: str
    policy: str
    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    replicas: tuple[int, ...]
    shares: tuple[Share, ...]
    crossing: int = 0
    copies: tuple[Copy, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [
            f"partition of {self.graph}: {self.policy}, {len(self.ranks)} stages, "
            f"{self.crossing / 1e6:.3f} MB between them"
        ]
        lines += [
            f"  stage {stage}{self._where(stage)}: {count_text(share.nodes, 'node')}, "
            f"{1e3 * share.seconds:.3f} ms, {share.stored_bytes / 1e6:.2f} MB stored"
            for stage, share in enumerate(self.shares)
        ]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    def _where(self, stage: int) -> str:
        rank = self.ranks[stage]
        chunked = f" on rank {rank}" if len(self.replicas) < len(self.ranks) else ""
        count = self.replicas[rank]
        return chunked + (f" on {count} slots" if count > 1 else "")


def make_partition(
    workload: Workload,
    graph: str,
    policy: str,
    stages: Sequence[int],
    *,
    ranks: Sequence[int] | None = None,
    replicas: Sequence[int] | None = None,
    copies: Sequence[Copy] = (),
    notes: Sequence[str] = (),
) -> Partition:
    """The partition in which each node is in the stage at its place.

    One rank a stage, and one slot a rank, by default.
    """
    count = max(stages, default=-1) + 1
    found = Shares.of(workload, stages, range(count))
    assert all(found.nodes), f"a stage has no node: {found.nodes}"
    assert all(
        stages[value.maker] <= stages[reader] for value in workload.sent for reader in value.readers
    ), "stages are numbered in an order in which they can be done"
    ranks = tuple(range(count)) if ranks is None else tuple(ranks)
    return Partition(
        graph,
        policy,
        tuple(stages),
        ranks,
        tuple(replicas) if replicas is not None else (1,) * (max(ranks, default=-1) + 1),
        tuple(
            Share(found.nodes[i], found.seconds[i], round(found.stored[i])) for i in range(count)
        ),
        found.crossing,
        tuple(copies),
        tuple(notes),
    )
