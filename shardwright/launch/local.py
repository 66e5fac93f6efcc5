"""A process a slot on this machine, kept alive between calls.

The driver starts the workers (`spawn`), sends each its part of a call and collects what they
finish. One thread a worker sleeps on its connection; one more reads the workers' heartbeats
(`Board`) now and then. Whatever goes wrong anywhere ends all workers and becomes one error that
names rank and supertask; no process outlives the driver, or a failure.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass
from typing import Any

from shardwright.comm import make_store
from shardwright.engine.board import Line, State, make_board
from shardwright.engine.generator import Slices
from shardwright.engine.program import Entry, entries_of
from shardwright.errors import LaunchError, RunError, ShardwrightError, WorkerError
from shardwright.launch.backend import START_TIMEOUT, Backend
from shardwright.launch.operators import end_of_script
from shardwright.launch.protocol import (
    Completed,
    EngineOptions,
    Failed,
    Request,
    Stop,
    worker_error,
)
from shardwright.launch.spawn import WorkerHandle, end_workers, start_workers
from shardwright.pipeline import Document, Pipeline

_GRACE_PERIOD = 10.0
"""Seconds that idle workers get to end by themselves."""
_NEWS_PERIOD = 0.5
"""Seconds in which the death of a worker is heard of after others have lost it."""
_OF_OTHERS = (WorkerError.__name__, LaunchError.__name__)
"""Errors that a worker meets where another one is gone."""


class LocalProcesses(Backend):
    """Worker processes, their connections, and the calls they are running."""

    is_remote = True

    def __init__(
        self, pipeline: Pipeline, options: EngineOptions, modules: Sequence[str], timeout: float
    ) -> None:
        end_of_script()
        super().__init__(pipeline, options, modules)
        self._numbers = itertools.count(-1)  # The first is no call.
        self._timeout = timeout
        self._answers = 0
        self._ended = threading.Event()
        self._error: ShardwrightError | None = None
        message, tensors = self._load_message(0, pipeline, {})
        self._board_file, self._board = make_board(len(self._slots))
        self._store_file = make_store()
        self._workers: list[WorkerHandle] = []
        self._started: Future[Any] | None = None
        try:
            shared = self._board_file.fileno(), self._store_file.fileno()
            self._workers = start_workers(len(self._slots), options.threads, *shared)
            for worker in self._workers:
                threading.Thread(target=self._listen, args=(worker,), daemon=True).start()
            threading.Thread(target=self._watch, daemon=True).start()
            self._started = self._ask(message, tensors)
            self._started.result()
        except BaseException:
            self.close(abort=True)
            raise

    @property
    def _is_started(self) -> bool:
        return self._started is not None and self._started.done()

    def close(self, *, abort: bool) -> None:
        """End the workers: idle ones by themselves, all others by force."""
        if not abort:
            self._wait_for_pending()
        graceful = not abort and not self._ended.is_set()
        self._ended.set()
        if graceful:
            for worker in self._workers:
                worker.tell(Stop())
        self._end(_GRACE_PERIOD if graceful else 0.0)
        self._fail_pending(RunError("the runner was closed during the call"))

    def _check_running(self) -> None:
        if self._error is not None:
            raise copy(self._error)  # What ended the workers, to whoever asks them now.
        if self._ended.is_set():
            raise RunError("the workers have ended: the runner was closed")

    def _send(self, message: Request, tensors: Slices) -> None:
        """Send every worker a message; returns when they are on their way."""
        try:
            for worker, slot in zip(self._workers, self._slots, strict=True):
                # Where a worker is gone, the thread that listens to it finds out what happened.
                worker.tell(message, tensors.get(slot, {}))
        except BaseException:
            self.close(abort=True)  # A message that was cut off cannot be mended.
            raise

    def _listen(self, worker: WorkerHandle) -> None:
        """Take a worker's messages until its connection ends."""
        try:
            while True:
                message, tensors = worker.connection.receive()
                if isinstance(message, Completed):
                    self._answers += 1
                    self._complete(self._slots[worker.rank], message, tensors)
                elif isinstance(message, Failed):
                    self._fail(self._failure(worker.rank, message))
        except EOFError:
            if not self._ended.is_set():
                self._fail(self._death(worker))

    # --- failing ----------------------------------------------------------------------------

    def _fail(self, error: ShardwrightError) -> None:
        """The first error ends all workers and all calls."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error
        self._ended.set()
        self._end(0.0)
        self._fail_pending(error)

    def _end(self, grace_period: float) -> None:
        end_workers(self._workers, grace_period)
        self._board_file.close()
        self._store_file.close()

    def _error_of(self, slot: str, done: Completed) -> ShardwrightError:
        assert done.error is not None
        return self._failure(self._slots.index(slot), done.error)

    def _failure(self, rank: int, failed: Failed) -> ShardwrightError:
        """The error that a worker reports, or the death of another one that is its cause."""
        if failed.error in _OF_OTHERS:
            self._ended.wait(_NEWS_PERIOD)  # No longer than until the cause is known.
            for worker in self._workers:
                if worker.rank != rank and worker.process.poll() is not None:
                    return self._death(worker)
        return worker_error(failed, rank, self._slots[rank], remote=True)

    def _death(self, worker: WorkerHandle) -> ShardwrightError:
        if not self._is_started:
            return LaunchError(
                f"worker {worker.rank} (device slot {self._slots[worker.rank]!r}) ended before it "
                f"was ready: {worker.ending()}; what it printed says more"
            )
        position = self._position(worker.rank, self._board.read(worker.rank))
        return WorkerError(
            f"the worker is gone: {worker.ending()}, {position.doing}",
            rank=worker.rank,
            lost=True,
            **position.labels(),
        )

    def _position(self, rank: int, line: Line) -> WorkerPosition:
        """Where a worker is, in whichever pipeline's call it is, or has still to begin."""
        slot = self._slots[rank]
        with self._lock:
            owed = next((each for each in self._pending.values() if slot in each.waiting), None)
            pending = self._pending.get(line.call, owed)
        document = pending.document if pending is not None else self._documents[0]
        return position_of(document, rank, line, owes=owed is not None)

    def _watch(self) -> None:
        """Fail when nothing has moved for too long although there is something to do."""
        seen, since = None, time.monotonic()
        while not self._ended.wait(min(1.0, self._timeout / 10)):
            lines = [self._board.read(rank) for rank in range(len(self._slots))]
            state = (self._answers, [line.changes for line in lines])
            if not self._pending or state != seen:
                seen, since = state, time.monotonic()
                continue
            timeout = self._timeout if self._is_started else max(self._timeout, START_TIMEOUT)
            if time.monotonic() - since > timeout:
                self._fail(self._stall(lines, timeout))

    def _stall(self, lines: Sequence[Line], timeout: float) -> ShardwrightError:
        with self._lock:
            waiting = next((set(each.waiting) for each in self._pending.values()), set())
        ranks = [rank for rank, slot in enumerate(self._slots) if slot in waiting]
        if not self._is_started:
            return LaunchError(
                f"workers {ranks} were not ready after {timeout:g} s without progress; is the "
                "machine overloaded? Raise timeout= to wait longer"
            )
        positions = [self._position(rank, line) for rank, line in enumerate(lines)]
        stopped = [worker.rank for worker in self._workers if worker.is_stopped]
        return stall_error(positions, lines, ranks, timeout, stopped)


# --- where workers are, from their heartbeats -----------------------------------------------------

_DOING = {
    State.STARTING: "while it started",
    State.IDLE: "while it had no call to run",
    State.WORKING: "while it ran",
    State.WAITING: "while it waited for",
}


@dataclass(frozen=True, slots=True)
class WorkerPosition:
    """Where a worker is: a phrase, and the entry of its agenda, where it is at any."""

    doing: str
    entry: Entry | None = None

    def labels(self) -> dict[str, Any]:
        """The entry's fields by name, as `WorkerError` takes them."""
        return self.entry._asdict() if self.entry is not None else {}


def position_of(document: Document, rank: int, line: Line, *, owes: bool = False) -> WorkerPosition:
    """The position of a worker that runs ``document``, by its line of the board.

    One that is in no call, but ``owes`` one, is before the first entry of its agenda.
    """
    doing = _DOING[line.state]
    if line.step < 0 and not owes:
        return WorkerPosition(doing)
    found = entries_of(document, list(document.devices)[rank])
    if line.step < 0:
        return WorkerPosition(f"{doing}, before {found[0].task}" if found else doing, *found[:1])
    entry = found[line.step]
    seconds = time.monotonic() - line.since
    what = "call" if entry.microbatch is None else f"microbatch {entry.microbatch} of step"
    return WorkerPosition(
        f"{doing} {entry.task} of {what} {line.call}, since {seconds:.1f} s", entry
    )


def stall_error(
    positions: Sequence[WorkerPosition],
    lines: Sequence[Line],
    waiting: Sequence[int],
    timeout: float,
    stopped: Sequence[int] = (),
) -> WorkerError:
    """The error for a run in which nothing moves; the ranks ``waiting`` owe its oldest call.

    Blames a worker whose process is ``stopped``; else the one that computes; else one that has not
    begun; else the one that waits longest, since whoever it waits for would have begun or computed.
    """
    suspects = [
        *stopped,
        *(rank for rank, line in enumerate(lines) if line.state is State.WORKING),
        *(rank for rank in waiting if lines[rank].state is State.IDLE),
        *sorted(range(len(lines)), key=lambda rank: lines[rank].since),
    ]
    everyone = "; ".join(f"rank {rank} {each.doing}" for rank, each in enumerate(positions))
    blamed = positions[suspects[0]]
    held = ", its process is stopped" if stopped else ""
    return WorkerError(
        f"nothing has moved for {timeout:g} s{held}, {blamed.doing}; raise timeout= if a "
        f"supertask may take longer. All ranks: {everyone}",
        rank=suspects[0],
        lost=True,
        **blamed.labels(),
    )
