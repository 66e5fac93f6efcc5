from __future__ import annotations

import os
import time

from shardwright.engine.board import Board, State, make_board


def test_a_worker_writes_what_the_driver_reads() -> None:
    file, board = make_board(2)
    with file:
        worker = Board.attach(os.dup(file.fileno()), 1, 2)
        before = time.monotonic()
        worker.write(State.WORKING, 3, 5)
        line = board.read(1)
        assert (line.call, line.step, line.state) == (3, 5, State.WORKING)
        assert before <= line.since <= time.monotonic()
        assert board.read(0).changes == 0


def test_only_changes_count() -> None:
    board = Board.private()
    board.write(State.WAITING, 1, 2)
    board.write(State.WAITING, 1, 2)
    assert board.read(0).changes == 1
    board.write(State.IDLE)
    assert board.read(0)[:4] == (2, -1, -1, State.IDLE)


def test_each_step_of_a_start_counts() -> None:
    board = Board.private()
    board.write(State.STARTING)
    board.write(State.STARTING)
    assert board.read(0).changes == 2
