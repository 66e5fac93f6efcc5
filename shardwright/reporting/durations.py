"""Who did what for how long in a run, as tables.

In comes a `Timeline`; out go rich tables. Seconds are those in which at least one event of a kind
was under way.
"""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from shardwright.engine.timeline import Timeline
from shardwright.ir.quantities import format_bytes, seconds_text
from shardwright.reporting.tables import new_table


def slot_table(timeline: Timeline) -> Table:
    """One row a device slot: seconds it computed, communicated and waited, and bytes it sent.

    The share is of the time from the first event of all slots to the last. Communication goes on
    beside computing, so the columns need not add up to it.
    """
    headings = ("calls", "computes", "share", "communicates", "waits", "sends")
    table = new_table("Who did what for how long", ("slot",), headings)
    start = min((event.start for event in timeline.events), default=0.0)
    span = max((event.end for event in timeline.events), default=start) - start
    for row in timeline.summary():
        table.add_row(
            escape(row.slot),
            str(row.calls),
            seconds_text(row.compute),
            f"{row.compute / span if span else 0:.0%}",
            seconds_text(row.communication),
            seconds_text(row.waiting),
            format_bytes(row.sent),
        )
    return table


def task_table(timeline: Timeline, rows: int = 12) -> Table:
    """The supertasks that took longest in all calls together, slowest first."""
    durations: dict[tuple[str, str, str], list[float]] = {}
    for event in timeline.events:
        if event.kind != "wait":
            key = (event.slot, event.task, event.kind)
            durations.setdefault(key, []).append(event.end - event.start)
    slowest = sorted(durations.items(), key=lambda item: -sum(item[1]))
    shown = "Supertasks" if len(slowest) <= rows else f"The {rows} longest of {len(slowest)} tasks"
    table = new_table(shown, ("slot", "supertask", "kind"), ("calls", "together", "a call"))
    for (slot, task, kind), seconds in slowest[:rows]:
        total = sum(seconds)
        each = seconds_text(total / len(seconds))
        table.add_row(
            escape(slot), escape(task), kind, str(len(seconds)), seconds_text(total), each
        )
    return table
