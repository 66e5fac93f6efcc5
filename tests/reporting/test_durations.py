from collections.abc import Callable

from shardwright.engine.timeline import Event, Timeline
from shardwright.reporting.tables import slot_table, task_table

Draw = Callable[..., str]
Stream = Callable[[int], list[Event]]

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


def test_slot_table(drawn: Draw, stream: Stream) -> None:
    assert drawn(slot_table(Timeline.of(stream(2)))) == SLOTS.strip("\n")
    assert "slot" in drawn(slot_table(Timeline.of([])))


def test_task_table(drawn: Draw, stream: Stream) -> None:
    assert drawn(task_table(Timeline.of(stream(2)), rows=3)) == TASKS.strip("\n")
