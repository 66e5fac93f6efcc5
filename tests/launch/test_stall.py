from __future__ import annotations

import time

from shardwright.engine.board import Line, State
from shardwright.engine.program import Entry
from shardwright.errors import WorkerError
from shardwright.launch.stall import describe_place, describe_stall
from tests.runtime.sketch import chain


def line(state: State, step: int = -1, ago: float = 0.0) -> Line:
    return Line(1, 0 if step >= 0 else -1, step, state, time.monotonic() - ago)


def stall(lines: list[Line], waiting: set[int], *stopped: int) -> WorkerError:
    places = [describe_place(chain(3), rank, line) for rank, line in enumerate(lines)]
    return describe_stall(places, lines, waiting, 4, stopped)


def test_places() -> None:
    pipeline = chain(3)
    assert describe_place(pipeline, 1, line(State.IDLE)).entry is None
    place = describe_place(pipeline, 1, line(State.IDLE), owes=True)
    assert place.entry == Entry("recv.y0@d1", "y0@d1")
    assert place.doing == "while it had no call to run, before recv.y0@d1"
    place = describe_place(pipeline, 1, line(State.WAITING, 0))
    assert place.entry == Entry("recv.y0@d1", "y0@d1")
    place = describe_place(pipeline, 1, line(State.WORKING, 1, ago=2))
    assert place.entry == Entry("d1.0")
    assert "d1.0 of call 0, since 2." in place.doing


def test_the_one_that_works_is_to_blame() -> None:
    lines = [line(State.WAITING, 0, 9), line(State.WORKING, 1, 5), line(State.IDLE)]
    error = stall(lines, {0, 1, 2})
    assert (error.rank, error.task) == (1, "d1.0")
    assert "nothing has moved for 4 s" in str(error)
    assert "rank 0 while it waited" in str(error)


def test_else_one_that_has_not_begun() -> None:
    lines = [line(State.IDLE), line(State.IDLE), line(State.WAITING, 0, 9)]
    assert stall(lines, {1, 2}).rank == 1


def test_else_the_one_that_waits_longest() -> None:
    lines = [line(State.IDLE), line(State.WAITING, 0, 3), line(State.WAITING, 0, 9)]
    error = stall(lines, {1, 2})
    assert (error.rank, error.task, error.tensor) == (2, "recv.y1@d2", "y1@d2")


def test_one_that_is_stopped_before_all() -> None:
    lines = [line(State.WAITING, 0, 9), line(State.WORKING, 1, 5), line(State.WAITING, 0, 3)]
    error = stall(lines, {0, 1, 2}, 2)
    assert error.rank == 2
    assert "for 4 s, its process is stopped, while it waited" in str(error)
