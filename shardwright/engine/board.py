"""A notice board in shared memory: what each worker is doing, for the driver that watches them.

A worker writes its line without a system call; the driver reads all lines to see
whether anything moves, and to say where a worker was that died or stood still. The memory is a file
without a name, handed to the workers as a descriptor, so nothing is left when they are gone.

A line is a count of changes, call, step, state and the time of the last change. It may be read in
the middle of a change; that is good enough for what it is for.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import time
from enum import IntEnum
from typing import BinaryIO, NamedTuple

_LINE = struct.Struct("=qqqqd")


class State(IntEnum):
    """What a worker is doing; ``WAITING`` is for others, ``IDLE`` for a call."""

    STARTING = 0
    IDLE = 1
    WORKING = 2
    WAITING = 3


class Line(NamedTuple):
    """One worker's line; ``call`` and ``step`` are -1 where it is in none, times monotonic."""

    changes: int
    call: int
    step: int
    state: State
    since: float


class Board:
    """One worker's line to write, or all lines to read."""

    def __init__(self, memory: mmap.mmap | bytearray, rank: int) -> None:
        self._memory = memory
        self._rank = rank
        self._changes = 0
        self._last: tuple[int, int, State] | None = None

    @classmethod
    def private(cls) -> Board:
        """A board that nobody reads."""
        return cls(bytearray(_LINE.size), 0)

    @classmethod
    def attach(cls, descriptor: int, rank: int, size: int) -> Board:
        """The board of a descriptor, to write the line of ``rank``."""
        return cls(mmap.mmap(descriptor, size * _LINE.size), rank)

    def write(self, state: State, call: int = -1, step: int = -1) -> None:
        """Say what the worker does now; the same again changes nothing, unless it is a start."""
        line = (call, step, state)
        if line != self._last or state is State.STARTING:
            self._last = line
            self._changes += 1
            offset = self._rank * _LINE.size
            _LINE.pack_into(self._memory, offset, self._changes, *line, time.monotonic())

    def read(self, rank: int) -> Line:
        """A worker's line."""
        changes, call, step, state, since = _LINE.unpack_from(self._memory, rank * _LINE.size)
        return Line(changes, call, step, State(state), since)


def make_board(size: int) -> tuple[BinaryIO, Board]:
    """A file without a name that holds ``size`` lines, and the board over it."""
    descriptor, path = tempfile.mkstemp()
    os.unlink(path)
    os.ftruncate(descriptor, size * _LINE.size)
    return os.fdopen(descriptor, "rb"), Board.attach(descriptor, -1, size)
