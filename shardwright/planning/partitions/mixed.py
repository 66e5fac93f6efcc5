"""Mixed pipes: several virtual stages on each device, so that uneven layers even out.

Comes in: a workload, how many ranks there are and how many stages each shall have. Goes out: a
stage of each node, and the rank of each stage. A rank's load is what all its stages carry together,
so one with a heavy stage gets a light one beside it; what goes from stage to stage of one rank is
not sent ("Fine-tuning giant neural networks on commodity hardware with automatic pipeline model
parallelism", Eliad et al., 2021, calls these mixed pipes). What always holds: each rank has a
stage, and the busiest is no busier than where stages lie on the ranks in rounds.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.planning.partitions.exact import contiguous
from shardwright.planning.partitions.memory_limit import MemoryLimit
from shardwright.planning.partitions.refine import most_seconds, refine
from shardwright.planning.partitions.shares import Shares
from shardwright.planning.partitions.workload import Workload


def mixed(
    workload: Workload,
    ranks: int,
    chunks: int = 2,
    *,
    placement: Sequence[int] | None = None,
    limit: MemoryLimit | None = None,
) -> tuple[list[int], list[int]]:
    """The stage of each node, and the rank of each of ``ranks`` × ``chunks`` stages.

    ``placement`` is that of a schedule; by default stages lie in rounds, or where that is better.
    """
    count = ranks * chunks
    cut = contiguous(workload, count)
    placements = [placement] if placement is not None else _placements(workload, cut, ranks, count)
    found = [(refine(workload, cut, ranks=at, limit=limit), list(at)) for at in placements]
    return min(found, key=lambda one: _merit(workload, *one))


def _merit(workload: Workload, stages: Sequence[int], ranks: Sequence[int]) -> tuple[float, float]:
    shares = Shares.of(workload, stages, ranks)
    return most_seconds(shares), shares.sent


def _placements(
    workload: Workload, stages: Sequence[int], ranks: int, count: int
) -> list[Sequence[int]]:
    """In rounds, down and up, and the largest stage first to the rank that has least."""
    rounds = [stage % ranks for stage in range(count)]
    folded = [
        stage % ranks if (stage // ranks) % 2 == 0 else ranks - 1 - stage % ranks
        for stage in range(count)
    ]
    return [rounds, folded, _largest_first(workload, stages, ranks, count)]


def _largest_first(workload: Workload, stages: Sequence[int], ranks: int, count: int) -> list[int]:
    """Each stage, the largest first, on the rank that has least so far."""
    loads = [0.0] * ranks
    found = [0] * count
    work = Shares.of(workload, stages, range(count)).work
    for stage in sorted(range(count), key=lambda stage: -work[stage]):
        found[stage] = min(range(ranks), key=loads.__getitem__)
        loads[found[stage]] += work[stage]
    return found
