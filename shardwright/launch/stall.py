"""Saying where workers were when one died or nothing moved, from the notice board's lines."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardwright.engine.board import Line, State
from shardwright.engine.program import Entry, entries_of
from shardwright.errors import WorkerError
from shardwright.pipeline.schema import Document

_DOING = {
    State.STARTING: "while it started",
    State.IDLE: "while it had no call to run",
    State.WORKING: "while it ran",
    State.WAITING: "while it waited for",
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker is: a phrase, and the entry of its agenda, where it is at any."""

    doing: str
    entry: Entry | None = None

    def labels(self) -> dict[str, Any]:
        """The entry's fields by name, as `WorkerError` takes them."""
        return self.entry._asdict() if self.entry is not None else {}


def describe_place(document: Document, rank: int, line: Line, *, owes: bool = False) -> Place:
    """The place that a worker's line tells of, which runs ``document``.

    One that is in no call, but ``owes`` one, is before the first entry of its agenda.
    """
    doing = _DOING[line.state]
    if line.step < 0 and not owes:
        return Place(doing)
    found = entries_of(document, list(document.devices)[rank])
    if line.step < 0:
        return Place(f"{doing}, before {found[0].task}" if found else doing, *found[:1])
    entry = found[line.step]
    seconds = time.monotonic() - line.since
    what = "call" if entry.microbatch is None else f"microbatch {entry.microbatch} of step"
    return Place(f"{doing} {entry.task} of {what} {line.call}, since {seconds:.1f} s", entry)


def describe_stall(
    places: Sequence[Place],
    lines: Sequence[Line],
    waiting: set[int],
    patience: float,
    stopped: Sequence[int] = (),
) -> WorkerError:
    """The error for a run in which nothing moves; the ranks ``waiting`` owe its oldest call.

    Blames a worker whose process is ``stopped``; else the one that computes; else one that has not
    begun; else the one that waits longest, since whoever it waits for would have begun or computed.
    """
    suspects = [
        *stopped,
        *(rank for rank, line in enumerate(lines) if line.state is State.WORKING),
        *(rank for rank in sorted(waiting) if lines[rank].state is State.IDLE),
        *sorted(range(len(lines)), key=lambda rank: lines[rank].since),
    ]
    everyone = "; ".join(f"rank {rank} {place.doing}" for rank, place in enumerate(places))
    blamed = places[suspects[0]]
    held = ", its process is stopped" if stopped else ""
    return WorkerError(
        f"nothing has moved for {patience:g} s{held}, {blamed.doing}; raise timeout= if a "
        f"supertask may take longer. All ranks: {everyone}",
        rank=suspects[0],
        lost=True,
        **blamed.labels(),
    )
