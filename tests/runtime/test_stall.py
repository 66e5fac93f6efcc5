from __future__ import annotations

import time

from shardwright.runtime.board import Line, State
from shardwright.runtime.stall import describe_place, describe_stall
from tests.runtime.sketch import chain


def line(state: State, step: int = -1, ago: float = 0.0) -> Line:
    return Line(1, 0 if step >= 0 else -1, step, state, time.monotonic() - ago)


def test_places() -> None:
    pipeline = chain(3)
    assert describe_place(pipeline, 1, line(State.IDLE)).task is None
    place = describe_place(pipeline, 1, line(State.WAITING, 0))
    assert (place.task, place.tensor) == ("recv.y0@d1", "y0@d1")
    place = describe_place(pipeline, 1, line(State.WORKING, 1, ago=2))
    assert (place.task, place.tensor) == ("d1.0", None)
    assert "d1.0 of call 0, since 2." in place.doing


def test_the_one_that_works_is_to_blame() -> None:
    lines = [line(State.WAITING, 0, 9), line(State.WORKING, 1, 5), line(State.IDLE)]
    error = describe_stall(chain(3), lines, {0, 1, 2}, 4)
    assert (error.rank, error.task) == (1, "d1.0")
    assert "nothing has moved for 4 s" in str(error)
    assert "rank 0 while it waited" in str(error)


def test_else_one_that_has_not_begun() -> None:
    lines = [line(State.IDLE), line(State.IDLE), line(State.WAITING, 0, 9)]
    assert describe_stall(chain(3), lines, {1, 2}, 4).rank == 1


def test_else_the_one_that_waits_longest() -> None:
    lines = [line(State.IDLE), line(State.WAITING, 0, 3), line(State.WAITING, 0, 9)]
    error = describe_stall(chain(3), lines, {1, 2}, 4)
    assert (error.rank, error.task, error.tensor) == (2, "recv.y1@d2", "y1@d2")
