from collections.abc import Callable

import pytest

from shardwright.engine.timeline import Event
from shardwright.reporting.chart import TimelineChart

Draw = Callable[..., str]
Stream = Callable[[int], list[Event]]

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


def test_one_call(drawn: Draw, stream: Stream) -> None:
    assert drawn(TimelineChart(stream(1))) == ONE_CALL.strip("\n")


def test_three_calls_overlap(drawn: Draw, stream: Stream) -> None:
    assert drawn(TimelineChart(stream(3))) == THREE_CALLS.strip("\n")


def test_many_calls_show_what_took_most_of_each_column(drawn: Draw, stream: Stream) -> None:
    assert drawn(TimelineChart(stream(40))) == FORTY_CALLS.strip("\n")


@pytest.mark.parametrize("width", [64, 80, 140])
def test_rows_are_as_wide_as_the_console(drawn: Draw, stream: Stream, width: int) -> None:
    for calls in (1, 5, 100):
        lines = drawn(TimelineChart(stream(calls)), width).splitlines()
        assert len(lines) == 4
        assert all(len(line) <= width for line in lines)
        assert len(lines[2]) == width, "d1 works to the end"


def test_kinds_are_told_apart_by_colour_too(drawn: Draw, stream: Stream) -> None:
    text = drawn(TimelineChart(stream(1)), color="standard")
    assert text.count("\x1b[") > 6


def test_events_of_no_length_and_no_events(drawn: Draw) -> None:
    assert drawn(TimelineChart([])) == "no events were recorded"
    assert "d0" in drawn(TimelineChart([Event("d0", 0, 0, "d0.0", "compute", 5.0, 5.0)]))


def test_computing_is_drawn_over_communication_beside_it(drawn: Draw) -> None:
    events = [
        Event("d0", 0, 0, "d0.0", "compute", 0.0, 0.010),
        Event("d0", 0, 0, "send", "send", 0.002, 0.012),
    ]
    assert drawn(TimelineChart(events)) == OVERLAP.strip("\n")
