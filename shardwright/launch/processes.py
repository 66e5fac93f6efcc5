"""A process a slot on this machine, kept alive between calls.

The driver starts the workers (`launch`), sends each its part of a call and collects what they
finish. One thread a worker sleeps on its connection; one more looks at the notice board now and
then. Whatever goes wrong anywhere ends all workers and becomes one error that names rank and
supertask; no process outlives the driver, or a failure.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from shardwright.comm import make_store
from shardwright.engine.board import Line, make_board
from shardwright.engine.generator import Slices
from shardwright.engine.program import constants_of
from shardwright.engine.timeline import Event
from shardwright.errors import (
    LaunchError,
    RunError,
    ShardwrightError,
    WorkerError,
)
from shardwright.launch.backend import START_PATIENCE, Backend, Finish, running_future, settle
from shardwright.launch.connection import (
    Another,
    Answered,
    Ask,
    Begin,
    Done,
    Failed,
    Message,
    Ready,
    Start,
    Stop,
)
from shardwright.launch.failures import failure
from shardwright.launch.host import Reply
from shardwright.launch.launch import Child, end, launch
from shardwright.launch.making import Options
from shardwright.launch.operators import Sources, sources_for_workers
from shardwright.launch.script import end_of_script
from shardwright.launch.stall import Place, describe_place, describe_stall
from shardwright.pipeline import Document, Pipeline

_END_PATIENCE = 10.0
"""Seconds that idle workers get to end by themselves."""

_GRACE = 0.5
"""Seconds in which the death of a worker is heard of after others have lost it."""

_OF_OTHERS = (WorkerError.__name__, LaunchError.__name__)
"""Errors that a worker meets where another one is gone."""


@dataclass(slots=True)
class _Call:
    """A call or request under way: what has come of it, and which ranks are not done with it.

    A request, which has no ``finish``, gets replies by slot, or the first error.
    """

    document: Document
    future: Future[Any]
    finish: Finish | None
    waiting: set[int]
    outputs: dict[str, Tensor] = field(default_factory=dict)
    replies: dict[str, Reply] = field(default_factory=dict)
    error: ShardwrightError | None = None

    def settle(self) -> None:
        """Set the result, when no rank is waited for."""
        if self.error is not None:
            self.future.set_exception(self.error)
        elif self.finish is not None:
            settle(self.future, self.finish, self.outputs)
        else:
            self.future.set_result(self.replies)


class Processes(Backend):
    """Worker processes, their connections, and the calls they are running."""

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        timeout: float,
        threads: int,
        options: Options,
        modules: Sequence[str],
    ) -> None:
        end_of_script()
        self._pipeline = pipeline
        self._modules = modules
        self._loaded: dict[int, Document] = {0: pipeline}
        self._slots = list(pipeline.devices)
        self._timeout = timeout
        self._lock = threading.Lock()
        self._calls: dict[int, _Call] = {}
        self._events: list[Event] = []
        self._answers = 0
        self._ready: set[int] = set()
        self._started = threading.Event()
        self._ended = threading.Event()
        self._error: ShardwrightError | None = None
        sources = sources_for_workers(pipeline, modules)
        self._board_file, self._board = make_board(len(self._slots))
        self._store_file = make_store()
        self._children: list[Child] = []
        self._start(threads, options, sources)

    def begin(self, call: int, inputs: Slices, finish: Finish, *, pipeline: int = 0) -> Future[Any]:
        """Send every worker its inputs; returns when they are on their way."""
        return self._ask_all(call, finish, Begin(call, pipeline), inputs, self._loaded[pipeline])

    def load(
        self, call: int, number: int, pipeline: Pipeline, shared: Mapping[str, str]
    ) -> Future[Any]:
        """Send every worker another pipeline."""
        sources = sources_for_workers(pipeline, self._modules)
        self._loaded[number] = pipeline
        document, directory = pipeline.to_json(), _directory(pipeline)
        held = {slot: _held_constants(pipeline, slot, shared) for slot in self._slots}
        message = Another(call, number, document, directory, dict(shared), sources)
        return self._ask_all(call, None, message, held)

    def ask(
        self, call: int, function: str, arguments: Any, tensors: Slices
    ) -> Future[dict[str, Reply]]:
        """Send every worker a request, with its tensors."""
        return self._ask_all(call, None, Ask(call, function, arguments), tensors)

    def _ask_all(
        self,
        call: int,
        finish: Finish | None,
        message: Message,
        tensors: Slices,
        document: Document | None = None,
    ) -> Future[Any]:
        """Send a message to every worker, each with its tensors; the future is of all of them."""
        future = running_future()
        with self._lock:
            if self._error is not None:
                raise copy(self._error)  # What ended the workers, to whoever asks them now.
            if self._ended.is_set():
                raise RunError("the workers have ended: the runner was closed")
            ranks = set(range(len(self._slots)))
            self._calls[call] = _Call(document or self._pipeline, future, finish, ranks)
        try:
            for child, slot in zip(self._children, self._slots, strict=True):
                child.connection.send(message, tensors.get(slot, {}))
        except OSError:
            future.exception()  # The thread that listens to the worker finds out what happened.
        except BaseException:
            self.close(abort=True)  # A message that was cut off cannot be mended.
            raise
        return future

    def events(self) -> Sequence[Event]:
        """The events of finished calls."""
        with self._lock:
            return list(self._events)

    def close(self, *, abort: bool) -> None:
        """End the workers: idle ones by themselves, all others by force."""
        if not abort:
            for call in self._under_way():
                call.future.exception()
        graceful = not abort and not self._ended.is_set()
        self._ended.set()
        if graceful:
            self._send_all(Stop())
        self._bury(_END_PATIENCE if graceful else 0.0)
        for call in self._under_way(forget=True):
            call.future.set_exception(RunError("the runner was closed during the call"))

    def _under_way(self, *, forget: bool = False) -> list[_Call]:
        with self._lock:
            calls = list(self._calls.values())
            if forget:
                self._calls.clear()
        return calls

    # --- starting ---------------------------------------------------------------------------

    def _start(self, threads: int, options: Options, sources: Sources) -> None:
        """Start the workers, tell them what to be and wait until all are ready, or end them."""
        try:
            shared = self._board_file.fileno(), self._store_file.fileno()
            self._children = launch(len(self._slots), threads, *shared)
            document = self._pipeline.to_json()
            where = _directory(self._pipeline)
            for child, slot in zip(self._children, self._slots, strict=True):
                start = Start(
                    child.rank,
                    document,
                    where,
                    threads,
                    options.trace,
                    sources,
                    options.lookahead,
                )
                self._send(child, start, _held_constants(self._pipeline, slot, ()))
            for child in self._children:
                threading.Thread(target=self._listen, args=(child,), daemon=True).start()
            threading.Thread(target=self._watch, daemon=True).start()
            self._started.wait()
        except BaseException:
            self.close(abort=True)
            raise
        if self._error is not None:
            raise self._error

    # --- hearing from workers ---------------------------------------------------------------

    def _listen(self, child: Child) -> None:
        """Take a worker's messages until its connection ends."""
        try:
            while True:
                self._hear(child.rank, *child.connection.receive())
        except EOFError:
            if not self._ended.is_set():
                self._fail(self._death(child))

    def _hear(self, rank: int, message: Message, tensors: dict[str, Tensor]) -> None:
        match message:
            case Ready():
                self._ready.add(rank)
                if len(self._ready) == len(self._slots):
                    self._started.set()
            case Done():
                self._collect(rank, message, tensors)
            case Answered():
                self._collect(rank, message, tensors)
            case Failed():
                self._fail(self._failure(rank, message))

    def _collect(self, rank: int, done: Done | Answered, tensors: dict[str, Tensor]) -> None:
        failed = done.error if isinstance(done, Answered) else None
        error = self._failure(rank, failed) if failed is not None else None
        with self._lock:
            self._answers += 1
            call = self._calls.get(done.call)
            if isinstance(done, Done):
                self._events.extend(done.events)
            if call is None:
                return
            if isinstance(done, Done):
                call.outputs.update(tensors)
            elif error is not None:
                call.error = call.error or error
            else:
                call.replies[self._slots[rank]] = Reply(done.value, tensors)
            call.waiting.discard(rank)
            if call.waiting:
                return
            del self._calls[done.call]
        call.settle()

    # --- failing ----------------------------------------------------------------------------

    def _fail(self, error: ShardwrightError) -> None:
        """The first error ends all workers and all calls."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error
        self._ended.set()
        self._bury(0.0)
        self._started.set()
        for call in self._under_way(forget=True):
            call.future.set_exception(error)

    def _failure(self, rank: int, failed: Failed) -> ShardwrightError:
        """The error that a worker reports; its own kind where it is about the user's input."""
        if failed.error in _OF_OTHERS:
            time.sleep(_GRACE)
            for child in self._children:
                if child.rank != rank and child.process.poll() is not None:
                    return self._death(child)
        return failure(failed, rank, self._slots[rank], elsewhere=True)

    def _death(self, child: Child) -> ShardwrightError:
        if not self._started.is_set():
            return LaunchError(
                f"worker {child.rank} (device slot {self._slots[child.rank]!r}) ended before it "
                f"was ready: {child.ending()}; what it printed says more"
            )
        place = self._place(child.rank, self._board.read(child.rank))
        return WorkerError(
            f"the worker is gone: {child.ending()}, {place.doing}",
            rank=child.rank,
            lost=True,
            **place.labels(),
        )

    def _place(self, rank: int, line: Line) -> Place:
        """Where a worker is, in whichever pipeline's call it is, or has still to begin."""
        with self._lock:
            owed = next((call for call in self._calls.values() if rank in call.waiting), None)
            call = self._calls.get(line.call, owed)
        document = call.document if call is not None else self._pipeline
        return describe_place(document, rank, line, owes=owed is not None)

    def _watch(self) -> None:
        """Fail when nothing has moved for too long although there is something to do."""
        seen, since = None, time.monotonic()
        while not self._ended.wait(min(1.0, self._timeout / 10)):
            lines = [self._board.read(rank) for rank in range(len(self._slots))]
            state = (self._answers, len(self._ready), [line.changes for line in lines])
            idle = self._started.is_set() and not self._calls
            if idle or state != seen:
                seen, since = state, time.monotonic()
                continue
            patience = self._timeout
            if not self._started.is_set():
                patience = max(patience, START_PATIENCE)
            if time.monotonic() - since > patience:
                self._fail(self._stall(lines, patience))

    def _stall(self, lines: Sequence[Line], patience: float) -> ShardwrightError:
        if not self._started.is_set():
            missing = sorted(set(range(len(self._slots))) - self._ready)
            return LaunchError(
                f"workers {missing} were not ready after {patience:g} s without progress; is the "
                "machine overloaded? Raise timeout= to wait longer"
            )
        with self._lock:
            waiting = next((set(call.waiting) for call in self._calls.values()), set())
        places = [self._place(rank, line) for rank, line in enumerate(lines)]
        stopped = [child.rank for child in self._children if child.is_stopped]
        return describe_stall(places, lines, waiting, patience, stopped)

    # --- sending and ending -----------------------------------------------------------------

    def _send(self, child: Child, message: Message, tensors: dict[str, Tensor]) -> None:
        try:
            child.connection.send(message, tensors)
        except OSError:
            raise self._death(child) from None

    def _send_all(self, message: Message) -> None:
        for child in self._children:
            try:
                child.connection.send(message)
            except OSError:
                continue  # It has ended already, which is what is wanted.

    def _bury(self, patience: float) -> None:
        end(self._children, patience=patience)
        self._board_file.close()
        self._store_file.close()


def _directory(pipeline: Pipeline) -> str | None:
    """Where paths of the pipeline's parameter files begin."""
    directory = pipeline.weights.directory
    return str(directory.resolve()) if directory is not None else None


def _held_constants(pipeline: Pipeline, slot: str, shared: Collection[str]) -> dict[str, Tensor]:
    """A slot's constants that are in no file, without those that it has already."""
    weights = pipeline.weights
    return {
        name: weights.read(info.value, info)
        for name, info in constants_of(pipeline, slot).items()
        if name not in shared and info.value is not None and weights.held(info.value) is not None
    }
