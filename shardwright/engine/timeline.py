"""Who did what for how long: the events of a run, their sums, and a trace for a browser.

Input: `Event`s from the workers; `Timeline` sums them up a device slot and writes them for
``chrome://tracing`` or Perfetto. Times are seconds of one clock, `time.monotonic`, which all
processes of a machine share; between machines clocks differ.

Invariant: every supertask has one event a call. Communication overlaps with computing,
so its events overlap others; ``wait`` events are when a worker had calls to run but nothing to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from shardwright.atomic import replacing

EventKind = Literal["compute", "send", "recv", "collective", "wait"]
COMMUNICATION: tuple[EventKind, ...] = ("send", "recv", "collective")

_TRACKS = {"compute": 0, "wait": 0, "send": 1, "recv": 1, "collective": 1}
_TRACK_NAMES = {0: "compute", 1: "communication"}


class Event(msgspec.Struct, frozen=True):
    """Something that took ``start`` to ``end``, in seconds.

    ``slot`` and ``rank`` say where, ``call`` in which call of the pipeline, ``task`` the supertask;
    a ``wait`` has the task that was waited for. ``nbytes`` is what a send or collective gave, or
    what a recv got. In a training step ``call`` is the step's number, and ``stage`` and
    ``microbatch`` are there where the task runs once a microbatch.
    """

    slot: str
    rank: int
    call: int
    task: str
    kind: EventKind
    start: float
    end: float
    nbytes: int = 0
    stage: int | None = None
    microbatch: int | None = None


@dataclass(frozen=True, slots=True)
class SlotSummary:
    """One device slot's sums: seconds, bytes given to others, and how many calls.

    ``communication`` is the time in which bytes were on their way, most of it beside computing;
    ``waiting`` is when there was nothing to do until some arrived.
    """

    slot: str
    rank: int
    calls: int
    compute: float
    communication: float
    waiting: float
    sent: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """The events of some calls, in order of their start."""

    events: tuple[Event, ...]

    @classmethod
    def of(cls, events: Iterable[Event]) -> Timeline:
        """A timeline of events given in any order."""
        return cls(tuple(sorted(events, key=lambda event: (event.start, event.rank))))

    def summary(self) -> list[SlotSummary]:
        """Totals of each device, by rank."""
        by_rank: dict[int, list[Event]] = {}
        for event in self.events:
            by_rank.setdefault(event.rank, []).append(event)
        return [_summarise(by_rank[rank]) for rank in sorted(by_rank)]

    def save_chrome_trace(self, path: str | Path) -> None:
        """Write the events as a Chrome trace: one process per device, with computation and
        communication.

        Times are in microseconds from the first event. Raises WriteError.
        """
        content = msgspec.json.encode({"traceEvents": self._trace_events()})
        with replacing(Path(path)) as temporary:
            temporary.write_bytes(content)

    def _trace_events(self) -> list[dict[str, Any]]:
        start = self.events[0].start if self.events else 0.0
        slots = {event.rank: event.slot for event in self.events}
        names = [
            _trace_name("process_name", rank, 0, f"rank {rank}: {slot}")
            for rank, slot in sorted(slots.items())
        ]
        names += [
            _trace_name("thread_name", rank, track, name)
            for rank in sorted(slots)
            for track, name in _TRACK_NAMES.items()
        ]
        return names + [_trace_event(event, start) for event in self.events]


def _summarise(events: Sequence[Event]) -> SlotSummary:
    def seconds(*kinds: EventKind) -> float:
        return _covered([(e.start, e.end) for e in events if e.kind in kinds])

    return SlotSummary(
        slot=events[0].slot,
        rank=events[0].rank,
        calls=len({event.call for event in events}),
        compute=seconds("compute"),
        communication=seconds(*COMMUNICATION),
        waiting=seconds("wait"),
        sent=sum(event.nbytes for event in events if event.kind in ("send", "collective")),
    )


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    """How long at least one of the intervals lasts."""
    total, reach = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return total


def _trace_name(kind: str, rank: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": track, "args": {"name": name}}


def _trace_event(event: Event, origin: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": event.task,
        "cat": event.kind,
        "pid": event.rank,
        "tid": _TRACKS[event.kind],
        "ts": (event.start - origin) * 1e6,
        "dur": (event.end - event.start) * 1e6,
        "args": {"call": event.call, "bytes": event.nbytes} | _work(event),
    }


def _work(event: Event) -> dict[str, int]:
    """Stage and microbatch, where the event has them."""
    named = {"stage": event.stage, "microbatch": event.microbatch}
    return {key: number for key, number in named.items() if number is not None}
