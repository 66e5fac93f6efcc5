"""Orders of work in which a backward gives all gradients at once.

GPipe: "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism" (Huang et
al., 2019). 1F1B: "Memory-Efficient Pipeline-Parallel DNN Training" (Narayanan et al., 2021), there
PipeDream-Flush. Interleaved 1F1B: "Efficient Large-Scale Language Model Training on GPU Clusters
Using Megatron-LM" (Narayanan et al., 2021).

Each function gives one rank's actions. With p ranks, n microbatches, v chunks, and F and B the
durations of a rank's whole forward and backward, the step takes, once n is at least p,

    gpipe, 1f1b    (n + p - 1) (F + B)
    interleaved    (n + (p - 1) / v) (F + B)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from shardwright.schedules.schedule import Action, Work


def gpipe(rank: int, ranks: int, chunks: int, microbatches: int) -> Iterator[Action]:
    """All forwards, then all backwards; every microbatch's activations are held."""
    yield from (Action("F", rank, microbatch) for microbatch in range(microbatches))
    yield from (Action("B", rank, microbatch) for microbatch in range(microbatches))


def one_forward_one_backward(
    rank: int, ranks: int, chunks: int, microbatches: int
) -> Iterator[Action]:
    """Forwards until the first gradient arrives, then a forward and a backward in turn.

    Rank r holds the activations of at most p - r microbatches.
    """
    forwards = [Action("F", rank, microbatch) for microbatch in range(microbatches)]
    backwards = [Action("B", rank, microbatch) for microbatch in range(microbatches)]
    return _in_turn(forwards, backwards, ranks - rank - 1)


def interleaved(rank: int, ranks: int, chunks: int, microbatches: int) -> Iterator[Action]:
    """1F1B over several chunks: a group of microbatches goes through a chunk, then the next.

    Megatron's groups are of p microbatches. Where n is no multiple of p ours are larger, as equal
    as can be: a group below p would let every rank wait at each change of chunks. Rank r holds at
    most (v - 1) g + 2 (p - r - 1) + 1 chunks' activations, where g is the largest group.
    """
    if chunks == 1:
        return one_forward_one_backward(rank, ranks, chunks, microbatches)
    groups = _groups(microbatches, ranks)
    stages = range(rank, ranks * chunks, ranks)
    ahead = (chunks - 1) * len(groups[0]) + 2 * (ranks - rank - 1)
    forwards = _by_groups("F", groups, stages)
    return _in_turn(forwards, _by_groups("B", groups, stages[::-1]), ahead)


def _groups(microbatches: int, least: int) -> list[range]:
    """The microbatches in as many groups of at least ``least`` as there can be; larger first."""
    count = max(1, microbatches // least)
    small, more = divmod(microbatches, count)
    starts = [small * i + min(i, more) for i in range(count + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def _by_groups(kind: Work, groups: Sequence[range], stages: Sequence[int]) -> list[Action]:
    return [
        Action(kind, stage, microbatch)
        for group in groups
        for stage in stages
        for microbatch in group
    ]


def _in_turn(
    forwards: Sequence[Action], backwards: Sequence[Action], ahead: int
) -> Iterator[Action]:
    """``ahead`` forwards, then a forward and a backward in turn, then the other backwards."""
    yield from forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[len(forwards[ahead:]) :]
