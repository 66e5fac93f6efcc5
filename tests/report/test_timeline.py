"""Charts and tables of hand-made events: two slots, calls of 10 ms each, in a stream."""

from io import StringIO

import pytest
from rich.console import Console, RenderableType

from shardwright.report.timeline import TimelineChart, slot_table, task_table
from shardwright.runtime.timeline import Event, Timeline

MS = 1e-3

ONE_CALL = """
    0                  5 ms               10 ms              15 ms
d0  0██████████████████████████████████████▲▲
d1  ········································▼▼0█████████████████████████████████████
    █ compute   ▲ send   ▼ receive   · wait   digits: calls
"""
THREE_CALLS = """
    0                   10 ms              20 ms               30 ms
d0  0██████████████████▲▲1█████████████████▲▲2████████████████▲▲
d1  ····················▼▼0█████████████████▼1█████████████████▼▼2██████████████████
    █ compute   ▲ send   ▼ receive   · wait   digits: calls
"""
FORTY_CALLS = """
    0                  100 ms              200 ms             300 ms
d0  0█1█2█3█4█5█6█7█8█████████████████████████████████████████████████████████████
d1  ··0█1█2█3█4█5█6█7█8█9███████████████████████████████████████████████████████████
    █ compute   ▲ send   ▼ receive   · wait   digits: calls
"""
OVERLAP = """
    0            2 ms          4 ms         6 ms         8 ms          10 ms
d0  0██████████████████████████████████████████████████████████████████▲▲▲▲▲▲▲▲▲▲▲▲▲
    █ compute   ▲ send   digits: calls
"""


def event(slot: str, call: int, kind: str, start: float, end: float, nbytes: int = 0) -> Event:
    rank = int(slot[1:])
    return Event(slot, rank, call, f"{kind}.{slot}", kind, start * MS, end * MS, nbytes)


def stream(calls: int) -> list[Event]:
    """Slot d0 computes 10 ms a call and sends; d1 waits for the first, then does the same."""
    events = [event("d1", 0, "wait", 0, 11)]
    for call in range(calls):
        start = 10 * call
        events.append(event("d0", call, "compute", start, start + 10))
        events.append(event("d0", call, "send", start + 10, start + 10.5, 4000))
        events.append(event("d1", call, "recv", start + 10.5, start + 11, 4000))
        events.append(event("d1", call, "compute", start + 11, start + 21))
    return events


def drawn(renderable: RenderableType, width: int = 84, color: str | None = None) -> str:
    console = Console(file=StringIO(), width=width, color_system=color, force_terminal=bool(color))
    console.print(renderable)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def test_one_call() -> None:
    assert drawn(TimelineChart(stream(1))) == ONE_CALL.strip("\n")


def test_three_calls_overlap() -> None:
    assert drawn(TimelineChart(stream(3))) == THREE_CALLS.strip("\n")


def test_many_calls_show_what_took_most_of_each_column() -> None:
    assert drawn(TimelineChart(stream(40))) == FORTY_CALLS.strip("\n")


@pytest.mark.parametrize("width", [64, 80, 140])
def test_rows_are_as_wide_as_the_console(width: int) -> None:
    for calls in (1, 5, 100):
        lines = drawn(TimelineChart(stream(calls)), width).splitlines()
        assert len(lines) == 4
        assert all(len(line) <= width for line in lines)
        assert len(lines[2]) == width, "d1 works to the end"


def test_kinds_are_told_apart_by_colour_too() -> None:
    text = drawn(TimelineChart(stream(1)), color="standard")
    assert text.count("\x1b[") > 6


def test_events_of_no_length_and_no_events() -> None:
    assert drawn(TimelineChart([])) == "no events were recorded"
    assert "d0" in drawn(TimelineChart([event("d0", 0, "compute", 5, 5)]))


def test_computing_is_drawn_over_communication_beside_it() -> None:
    events = [event("d0", 0, "compute", 0, 10), event("d0", 0, "send", 2, 12)]
    assert drawn(TimelineChart(events)) == OVERLAP.strip("\n")


SLOTS = """
Who did what for how long
slot  calls  computes  share  communicates  waits   sends
─────────────────────────────────────────────────────────
d0        2     20 ms    65%          1 ms   0 µs  8.0 kB
d1        2     20 ms    65%          1 ms  11 ms     0 B
"""
TASKS = """
The 3 longest of 4 tasks
slot  supertask   kind     calls  together  a call
──────────────────────────────────────────────────
d0    compute.d0  compute      2     20 ms   10 ms
d1    compute.d1  compute      2     20 ms   10 ms
d0    send.d0     send         2      1 ms  500 µs
"""


def test_slot_table() -> None:
    assert drawn(slot_table(Timeline.of(stream(2)))) == SLOTS.strip("\n")
    assert "slot" in drawn(slot_table(Timeline.of([])))


def test_task_table() -> None:
    assert drawn(task_table(Timeline.of(stream(2)), rows=3)) == TASKS.strip("\n")
