"""Saying where workers were when one died or nothing moved, from the notice board's lines."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from shardwright.errors import WorkerError
from shardwright.pipeline.connections import connect
from shardwright.pipeline.schema import Document
from shardwright.runtime.board import Line, State

_DOING = {
    State.STARTING: "while it started",
    State.IDLE: "while it had no call to run",
    State.WORKING: "while it ran",
    State.WAITING: "while it waited for",
}


class Place(NamedTuple):
    """Where a worker is: a phrase, and the supertask and tensor, where it is at any."""

    doing: str
    task: str | None = None
    tensor: str | None = None


def describe_place(document: Document, rank: int, line: Line) -> Place:
    """The place that a worker's line tells of."""
    doing = _DOING[line.state]
    if line.step < 0:
        return Place(doing)
    task = connect(document).order[list(document.devices)[rank]][line.step]
    spec = document.supertasks[task]
    tensor = next(iter((*spec.inputs, *spec.outputs))) if spec.group is not None else None
    seconds = time.monotonic() - line.since
    return Place(f"{doing} {task} of call {line.call}, since {seconds:.1f} s", task, tensor)


def describe_stall(
    document: Document, lines: Sequence[Line], waiting: set[int], patience: float
) -> WorkerError:
    """The error for a run in which nothing moves; the ranks ``waiting`` owe its oldest call.

    Blames the worker that computes; else one that has not begun; else the one that waits longest,
    since whoever it waits for would have begun or computed.
    """
    suspects = [
        *(rank for rank, line in enumerate(lines) if line.state is State.WORKING),
        *(rank for rank in sorted(waiting) if lines[rank].state is State.IDLE),
        *sorted(range(len(lines)), key=lambda rank: lines[rank].since),
    ]
    places = [describe_place(document, rank, line) for rank, line in enumerate(lines)]
    everyone = "; ".join(f"rank {rank} {place.doing}" for rank, place in enumerate(places))
    blamed = places[suspects[0]]
    return WorkerError(
        f"nothing has moved for {patience:g} s, {blamed.doing}; raise timeout= if a supertask may "
        f"take longer. All ranks: {everyone}",
        rank=suspects[0],
        task=blamed.task,
        tensor=blamed.tensor,
    )
