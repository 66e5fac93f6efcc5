"""A run's timeline in the terminal: a chart with one row a device slot over a time axis.

Input: the events of a `Timeline`; output: a rich renderable as wide as the console. Each kind of
work has its own letter as well as its own colour, so that the chart also reads without colours.
While events are few, each is at least one column wide; when they are many, a column shows what
took most of it. Computing is drawn over communication that overlaps with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from shardwright.engine.timeline import Event, EventKind
from shardwright.ir.tensor_meta import seconds_text


@dataclass(frozen=True, slots=True)
class Look:
    """How one kind of work is drawn."""

    label: str
    letter: str
    style: str


LOOKS: dict[EventKind, Look] = {
    "compute": Look("compute", "█", "green"),
    "send": Look("send", "▲", "bright_magenta"),
    "recv": Look("receive", "▼", "bright_cyan"),
    "collective": Look("collective", "◆", "bright_yellow"),
    "wait": Look("wait", "·", "dim"),
}
_DEPTH = {kind: depth for depth, kind in enumerate(LOOKS)}
TICK_COLUMNS = 12
"""Times on the axis are at least this many columns apart."""
COLUMNS_AN_EVENT = 4
"""Below this many columns for each event of a row, short events are no longer widened."""


@dataclass(frozen=True, slots=True)
class TimelineChart:
    """Rows of letters over a time axis, as wide as the console."""

    events: Sequence[Event]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw axis, rows and legend."""
        if not self.events:
            yield Text("no events were recorded")
            return
        rows = _by_slot(self.events)
        label_width = max(map(len, rows)) + 2
        axis = _TimeAxis.over(self.events, max(20, options.max_width - label_width))
        yield Text(" " * label_width + axis.text(), style="dim")
        for slot, events in rows.items():
            yield Text.assemble((slot.ljust(label_width), "bold"), *_row(events, axis))
        yield Text(" " * label_width).append_text(_legend(self.events))


@dataclass(frozen=True, slots=True)
class _TimeAxis:
    """Seconds to columns: column ``c`` is ``start + c * step`` to ``start + (c + 1) * step``."""

    start: float
    step: float
    columns: int

    @classmethod
    def over(cls, events: Sequence[Event], columns: int) -> _TimeAxis:
        start = min(event.start for event in events)
        span = max(event.end for event in events) - start
        return cls(start, max(span, 1e-9) / columns, columns)

    def cells(self, event: Event) -> range:
        """The columns an event touches, at least one."""
        first = min(int((event.start - self.start) / self.step), self.columns - 1)
        last = min(int((event.end - self.start) / self.step), self.columns - 1)
        return range(first, last + 1)

    def share(self, event: Event, column: int) -> float:
        """Seconds of an event within a column."""
        left = self.start + column * self.step
        return min(event.end, left + self.step) - max(event.start, left)

    def text(self) -> str:
        """Round times from the start, each beginning at its column."""
        tick = _round_up(TICK_COLUMNS * self.step)
        line = "0"
        for k in range(1, int(self.columns * self.step / tick) + 1):
            label = seconds_text(round(k * tick, 12))
            column = round(k * tick / self.step)
            if column + len(label) <= self.columns:
                line = line.ljust(column) + label
        return line


def _round_up(seconds: float) -> float:
    """The least of 1, 2 and 5 times a power of ten that is not less."""
    power: float = 10.0 ** math.floor(math.log10(seconds))
    return next(factor * power for factor in (1, 2, 5, 10, 20) if factor * power >= seconds)


def _by_slot(events: Sequence[Event]) -> dict[str, list[Event]]:
    rows: dict[str, list[Event]] = {}
    for event in sorted(events, key=lambda event: (event.rank, event.start)):
        rows.setdefault(event.slot, []).append(event)
    return rows


def _row(events: Sequence[Event], axis: _TimeAxis) -> Iterator[tuple[str, str]]:
    """Runs of equal cells as (letters, style)."""
    few = len(events) * COLUMNS_AN_EVENT <= axis.columns
    cells = _widened(events, axis) if few else _dominant(events, axis)
    for look, run in groupby(range(axis.columns), key=lambda column: _letters(cells.get(column))):
        width = len(list(run))
        yield (" " * width, "") if look is None else (_block(*look, width), LOOKS[look[0]].style)


def _letters(event: Event | None) -> tuple[EventKind, int] | None:
    """What tells the blocks of a row apart."""
    return (event.kind, event.call) if event else None


def _widened(events: Sequence[Event], axis: _TimeAxis) -> dict[int, Event]:
    """Each event in all the columns it touches: waits below, communication, computing above it,
    and on top what fits in a column or two, the shortest last.
    """

    def height(event: Event) -> tuple[bool, int, float]:
        fits = len(axis.cells(event)) <= 2
        return fits, 0 if fits else -_DEPTH[event.kind], event.start - event.end

    return {column: e for e in sorted(events, key=height) for column in axis.cells(e)}


def _dominant(events: Sequence[Event], axis: _TimeAxis) -> dict[int, Event]:
    """For each column the event that took most of it; computing where they took the same."""
    shares: dict[int, tuple[float, Event]] = {}
    for event in sorted(events, key=lambda event: _DEPTH[event.kind]):
        for column in axis.cells(event):
            share = axis.share(event, column)
            if column not in shares or share > shares[column][0]:
                shares[column] = (share, event)
    return {column: event for column, (_, event) in shares.items()}


def _block(kind: EventKind, call: int, width: int) -> str:
    """Letters of one kind; compute carries the number of its call where there is room."""
    number = str(call) if kind == "compute" and width > len(str(call)) else ""
    return number + LOOKS[kind].letter * (width - len(number))


def _legend(events: Sequence[Event]) -> Text:
    seen = {event.kind for event in events}
    legend = Text()
    for kind, look in LOOKS.items():
        if kind in seen:
            legend.append(f"{look.letter} {look.label}   ", style=look.style)
    return legend.append("digits: calls", style="dim")
