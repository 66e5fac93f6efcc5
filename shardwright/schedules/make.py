"""Schedules by name: GPipe, 1F1B, interleaved, and the zero-bubble ones.

Input: a kind, how many pipeline ranks, microbatches and chunks there are. Output: a `Schedule`. Any
numbers from 1 go together: fewer microbatches than stages, and microbatches that are no multiple of
the ranks.

Each generator gives one rank's actions. There are p ranks, n microbatches and v chunks; F, B and W
are the durations of a rank's whole forward, input gradients and weight gradients, where B counts W
in a schedule that does not split them.

GPipe: "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism" (Huang et
al., 2019). 1F1B: "Memory-Efficient Pipeline-Parallel DNN Training" (Narayanan et al., 2021), there
PipeDream-Flush. Interleaved 1F1B: "Efficient Large-Scale Language Model Training on GPU Clusters
Using Megatron-LM" (Narayanan et al., 2021). Once n is at least p, a step takes

    gpipe, 1f1b    (n + p - 1) (F + B)
    interleaved    (n + (p - 1) / v) (F + B)

In the zero-bubble ones weight gradients fill what would be waiting: only the gradients of a stage's
inputs are waited for by others, those of its weights can come at any time before the update.
Activations are then held from a forward until the weight gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, get_args

from shardwright.errors import ScheduleError
from shardwright.schedules.schedule import Action, Schedule, ScheduleKind, Work


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


# --- zero bubble ----------------------------------------------------------------------------------


def zb_h1(rank: int, ranks: int, chunks: int, microbatches: int) -> Iterator[Action]:
    """1F1B whose rank r does weight gradients r microbatches later.

    "Zero Bubble Pipeline Parallelism" (Qi et al., 2023). Every rank holds at most p microbatches,
    as the first rank of 1F1B does. Where W <= F <= B and n is at least p, it waits
    (p - 1) (F + B - W) a step; in 1F1B that is (p - 1) (F + B + W).
    """
    ahead = min(ranks - rank - 1, microbatches)
    yield from (Action("F", rank, microbatch) for microbatch in range(ahead))
    for microbatch in range(microbatches):
        if microbatch + ahead < microbatches:
            yield Action("F", rank, microbatch + ahead)
        yield Action("B", rank, microbatch)
        if microbatch >= rank:
            yield Action("W", rank, microbatch - rank)
    late = range(max(0, microbatches - rank), microbatches)
    yield from (Action("W", rank, microbatch) for microbatch in late)


def zb_v(rank: int, ranks: int, chunks: int, microbatches: int) -> Iterator[Action]:
    """Two chunks a rank, down the ranks and up again, so that the first rank has the loss.

    "Pipeline Parallelism with Controllable Memory" (Qi et al., 2024). Every rank holds at most 2p
    chunks' activations, which are p microbatches of the whole rank, as in 1F1B; where F = B = W
    and n is at least 2p - 1, it waits only (p - 1) chunks' F a step.
    With fewer microbatches the order is that of 2p - 1, less those that are not there.
    """
    down, up = rank, 2 * ranks - 1 - rank
    rest = ranks - rank
    phases: tuple[tuple[int, list[tuple[Work, int]]], ...] = (
        (2 * rest - 1, [("F", down)]),
        (rank, [("F", up), ("F", down)]),
        (rest, _all(up)),
        (max(microbatches - ranks, ranks - 1), [*_all(down), *_all(up)]),
        (rank, [("B", down), ("B", up)]),
        (rest, [("B", down), ("W", down)]),
        (rank, [("W", up)]),
        (rank, [("W", down)]),
    )
    done: Counter[tuple[Work, int]] = Counter()
    for times, works in phases:
        for work in works * times:
            if done[work] < microbatches:
                yield Action(*work, done[work])
            done[work] += 1


def _all(stage: int) -> list[tuple[Work, int]]:
    return [("F", stage), ("B", stage), ("W", stage)]


# --- by name --------------------------------------------------------------------------------------


def _in_rounds(ranks: int, chunks: int) -> tuple[int, ...]:
    return tuple(stage % ranks for stage in range(ranks * chunks))


def _down_and_up(ranks: int, chunks: int) -> tuple[int, ...]:
    return (*range(ranks), *reversed(range(ranks)))


class _Kind(NamedTuple):
    order: Callable[[int, int, int, int], Iterator[Action]]
    """A rank's actions from (rank, ranks, chunks, microbatches)."""
    placement: Callable[[int, int], tuple[int, ...]]
    """The rank of each stage from (ranks, chunks)."""
    chunks: int
    """How many where none are asked for."""
    other_chunks: bool
    """Whether another number of chunks can be asked for."""
    splits_backward: bool
    searched: tuple[int, ...]
    """Numbers of chunks that a search of plans tries."""


_KINDS: dict[ScheduleKind, _Kind] = {
    "1f1b": _Kind(one_forward_one_backward, _in_rounds, 1, False, False, (1,)),
    "gpipe": _Kind(gpipe, _in_rounds, 1, False, False, (1,)),
    "zb-h1": _Kind(zb_h1, _in_rounds, 1, False, True, (1,)),
    "interleaved": _Kind(interleaved, _in_rounds, 2, True, False, (2, 4)),
    "zb-v": _Kind(zb_v, _down_and_up, 2, False, True, (2,)),
}
"""In the order in which a search tries them: of equally fast ones the first is taken."""

KINDS: tuple[ScheduleKind, ...] = get_args(ScheduleKind)
"""The kinds that `make_schedule` knows."""

SEARCHED: tuple[tuple[str, int], ...] = tuple(
    (kind, chunks) for kind, row in _KINDS.items() for chunks in row.searched
)
"""Kinds, with their virtual stages a rank, that a search of plans tries."""


def make_schedule(
    kind: str, *, ranks: int, microbatches: int, chunks: int | None = None
) -> Schedule:
    """The schedule of a kind for ``ranks`` pipeline ranks with ``chunks`` virtual stages each.

    ``chunks`` is 2 by default for ``interleaved``, always 2 for ``zb-v`` and 1 for the others.
    Raises ScheduleError for an unknown kind, and for numbers that it does not have.
    """
    if kind not in _KINDS:
        raise ScheduleError(f"no schedule is called {kind!r}; there are {', '.join(KINDS)}")
    row = _KINDS[kind]
    chunks = row.chunks if chunks is None else chunks
    for name, number in (("ranks", ranks), ("microbatches", microbatches), ("chunks", chunks)):
        if number < 1:
            raise ScheduleError(f"{kind} with {name}={number}; at least 1 is needed")
    if chunks != row.chunks and not row.other_chunks:
        raise ScheduleError(
            f"{kind} has {row.chunks} stages a rank, not {chunks}; leave chunks out, or take "
            "interleaved"
        )
    return Schedule(
        kind=kind,
        ranks=ranks,
        chunks=chunks,
        microbatches=microbatches,
        placement=row.placement(ranks, chunks),
        actions=tuple(tuple(row.order(rank, ranks, chunks, microbatches)) for rank in range(ranks)),
        splits_backward=row.splits_backward,
    )
