"""Schedules by name.

Input: a kind, how many pipeline ranks, microbatches and chunks there are. Output: a
`Schedule`. Any numbers from 1 go together: fewer microbatches than stages, and microbatches that
are no multiple of the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, get_args

from shardwright.errors import ScheduleError
from shardwright.schedules.flushing import gpipe, interleaved, one_forward_one_backward
from shardwright.schedules.schedule import Action, Schedule, ScheduleKind
from shardwright.schedules.zero_bubble import zb_h1, zb_v


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


_KINDS: dict[ScheduleKind, _Kind] = {
    "gpipe": _Kind(gpipe, _in_rounds, 1, False, False),
    "1f1b": _Kind(one_forward_one_backward, _in_rounds, 1, False, False),
    "interleaved": _Kind(interleaved, _in_rounds, 2, True, False),
    "zb-h1": _Kind(zb_h1, _in_rounds, 1, False, True),
    "zb-v": _Kind(zb_v, _down_and_up, 2, False, True),
}

KINDS: tuple[ScheduleKind, ...] = get_args(ScheduleKind)
"""The kinds that `make_schedule` knows."""


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
