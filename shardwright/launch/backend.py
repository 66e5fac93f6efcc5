"""What runs a pipeline's slots: in this process, in processes of their own, or under torchrun.

A `Backend` numbers what it is asked, hands it to the worker of each slot that it drives, and gives
a future, which is done when all of them are.
"""

from __future__ import annotations

import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from shardwright.engine.generator import Slices
from shardwright.engine.program import constants_of
from shardwright.engine.timeline import Event
from shardwright.errors import ShardwrightError
from shardwright.launch.operators import OperatorSources, sources_for_workers
from shardwright.launch.protocol import (
    CallFunction,
    Completed,
    EngineOptions,
    LoadProgram,
    Request,
    RunStep,
    worker_error,
)
from shardwright.launch.worker import Reply
from shardwright.pipeline import Document, Pipeline

START_TIMEOUT = 120.0
"""Seconds without progress that a start may have: importing torch and reading weights take time."""

Finish = Callable[[dict[str, Tensor]], Any]
"""Makes the result of a call from all pipeline outputs by name."""


@dataclass(slots=True)
class PendingRequest:
    """Something that is asked of some slots, of which those ``waiting`` are not done with it.

    The result of a step is what ``finish`` makes of its outputs; of all else, replies by slot.
    """

    document: Document
    future: Future[Any]
    finish: Finish | None
    waiting: set[str]
    outputs: dict[str, Tensor] = field(default_factory=dict)
    replies: dict[str, Reply] = field(default_factory=dict)
    error: Exception | None = None

    def settle(self) -> None:
        """Set the future's result, or the exception that a slot or ``finish`` raised."""
        if self.error is not None:
            self.future.set_exception(self.error)
            return
        try:
            result = self.replies if self.finish is None else self.finish(self.outputs)
        except Exception as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class Backend(ABC):
    """The workers of a pipeline's slots, or those of them that this process drives.

    ``modules`` are what workers import first, see `operators`.
    """

    is_remote = False
    """Whether workers are other processes."""

    def __init__(
        self, pipeline: Pipeline, options: EngineOptions, modules: Sequence[str] = ()
    ) -> None:
        self._slots = list(pipeline.devices)
        self._driven: Collection[str] = self._slots
        self._options = options
        self._modules = modules
        self._documents: dict[int, Document] = {0: pipeline}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._pending: dict[int, PendingRequest] = {}
        self._events: list[Event] = []

    # --- what may be asked ------------------------------------------------------------------

    def run_step(self, inputs: Slices, finish: Finish, *, program: int = 0) -> Future[Any]:
        """Start a call or step; its future holds what ``finish`` makes of the outputs."""
        return self._ask(RunStep(0, program), inputs, finish, program)

    def load(self, pipeline: Pipeline, shared: Mapping[str, str]) -> tuple[int, Future[Any]]:
        """Keep ready another pipeline, and its number; ``shared`` maps its constants to these."""
        program = len(self._documents)
        message, tensors = self._load_message(program, pipeline, shared)
        self._documents[program] = pipeline
        return program, self._ask(message, tensors)

    def call_function(
        self, function: str, arguments: Any = None, tensors: Slices | None = None
    ) -> Future[dict[str, Reply]]:
        """Call a function with each slot (see `CallFunction`); the future has replies by slot."""
        return self._ask(CallFunction(0, function, arguments), tensors or {})

    def gather(self, replies: dict[str, Reply]) -> dict[str, Reply]:
        """The replies of all slots, from those of the slots that this process drives."""
        return replies

    def events(self) -> Sequence[Event]:
        """The events of finished calls, where traced."""
        with self._lock:
            return list(self._events)

    @abstractmethod
    def close(self, *, abort: bool) -> None:
        """End; at once with ``abort``, else when all under way is done. May be called twice."""

    # --- for the kinds of backends ----------------------------------------------------------

    @abstractmethod
    def _send(self, message: Request, tensors: Slices) -> None:
        """Hand a message to each slot that is driven, with its tensors."""

    @abstractmethod
    def _check_running(self) -> None:
        """Raise what ended the workers."""

    def _new_future(self) -> Future[Any]:
        """A future that cannot be cancelled: workers cannot take a call back."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        return future

    def _ask(
        self, message: Request, tensors: Slices, finish: Finish | None = None, program: int = 0
    ) -> Future[Any]:
        future = self._new_future()
        with self._lock:
            self._check_running()
            message.number = next(self._numbers)
            self._pending[message.number] = PendingRequest(
                self._documents[program], future, finish, set(self._driven)
            )
        self._send(message, tensors)
        return future

    def _load_message(
        self, program: int, pipeline: Pipeline, shared: Mapping[str, str]
    ) -> tuple[LoadProgram, Slices]:
        """What makes a pipeline ready, and for each slot its constants that are in no file."""
        weights = pipeline.weights
        tensors = {
            slot: {
                name: weights.read(info.value, info)
                for name, info in constants_of(pipeline, slot).items()
                if name not in shared
                and info.value is not None
                and weights.held(info.value) is not None
            }
            for slot in self._driven
        }
        message = LoadProgram(
            number=0,
            program=program,
            document=pipeline,
            directory=None if weights.directory is None else str(weights.directory.resolve()),
            folders=None if weights.folders is None else tuple(map(str, weights.folders)),
            shared=dict(shared),
            sources=sources_for_workers(pipeline, self._modules)
            if self.is_remote
            else OperatorSources(),
            options=self._options,
        )
        return message, tensors

    def _complete(self, slot: str, done: Completed, tensors: Mapping[str, Tensor]) -> None:
        """Note what a slot is done with; the future is when all are."""
        error = None if done.error is None else self._error_of(slot, done)
        with self._lock:
            self._events.extend(done.events)
            pending = self._pending.get(done.number)
            if pending is None:
                return
            if pending.finish is not None:
                pending.outputs.update(tensors)
            else:
                pending.replies[slot] = Reply(done.value, tensors)
            pending.error = pending.error or error
            pending.waiting.discard(slot)
            if pending.waiting:
                return
            del self._pending[done.number]
        pending.settle()

    def _error_of(self, slot: str, done: Completed) -> ShardwrightError:
        assert done.error is not None
        return worker_error(done.error, self._slots.index(slot), slot, remote=self.is_remote)

    def _wait_for_pending(self) -> None:
        for pending in list(self._pending.values()):
            pending.future.exception()

    def _fail_pending(self, error: Exception) -> None:
        """All that is under way ends with the error."""
        with self._lock:
            pending = list(self._pending.values())
            self._pending.clear()
        for each in pending:
            each.future.set_exception(error)
