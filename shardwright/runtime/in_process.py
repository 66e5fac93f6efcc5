"""All slots in this process and this thread: for debugging, checking, and pipelines of one slot.

The workers take turns, a step each, so calls stream through the slots just as they do between
processes, with the same bits. Work is done when somebody asks a future for its result. What a step
raises comes out with its own traceback and a note that says where it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shardwright.comm.local import LocalTransport, Switchboard
from shardwright.pipeline import Pipeline
from shardwright.runtime.backend import Backend, Finish, settle
from shardwright.runtime.generator import Slices
from shardwright.runtime.slot import constants_of, make_slot
from shardwright.runtime.timeline import Event
from shardwright.runtime.worker import Finished, Worker


class InProcess(Backend):
    """A worker a slot, driven by whoever waits for a result."""

    def __init__(self, pipeline: Pipeline, *, threads: int, trace: bool) -> None:
        self._threads = threads
        self._switchboard = Switchboard()
        self._workers = []
        for name in pipeline.devices:
            constants = pipeline.weights.load(constants_of(pipeline, name))
            slot = make_slot(pipeline, name, constants)
            transport = LocalTransport(self._switchboard, slot.device)
            self._workers.append(Worker(slot, transport, trace=trace))
        self._calls: dict[int, _Call] = {}
        self._events: list[Event] = []

    def begin(self, call: int, inputs: Slices, finish: Finish) -> Future[Any]:
        """Queue a call; it runs when a result is asked for."""
        for worker in self._workers:
            worker.begin(call, inputs[worker.slot.name])
        self._calls[call] = _Call(self, finish, waiting=len(self._workers))
        return self._calls[call]

    def events(self) -> Sequence[Event]:
        """The events of finished calls."""
        return self._events

    def close(self, *, abort: bool) -> None:
        """Finish calls under way, unless ``abort``."""
        while self._calls and not abort:
            self.drive(next(iter(self._calls.values())))
        self._forget()

    def drive(self, wanted: Future[Any]) -> None:
        """Let the workers take turns until a call is over."""
        with computing_threads(self._threads):
            while not wanted.done():
                moved = [self._advance(worker) for worker in self._workers]
                assert any(moved) or wanted.done(), "a checked pipeline does not deadlock"

    def _advance(self, worker: Worker) -> bool:
        try:
            moved = worker.advance()
        except Exception as error:
            error.add_note(_place(worker))
            self._fail(error)
            return True
        while (finished := worker.finished()) is not None:
            self._collect(finished)
        return moved

    def _collect(self, finished: Finished) -> None:
        call = self._calls[finished.call]
        self._events.extend(finished.events)
        call.outputs.update((name, tensor.cpu()) for name, tensor in finished.outputs.items())
        call.waiting -= 1
        if not call.waiting:
            del self._calls[finished.call]
            settle(call, call.finish, call.outputs)

    def _fail(self, error: Exception) -> None:
        """All calls under way end with the error; later ones start anew."""
        calls = list(self._calls.values())
        self._forget()
        for call in calls:
            call.set_exception(error)

    def _forget(self) -> None:
        self._calls.clear()
        self._switchboard.clear()
        for worker in self._workers:
            worker.reset()


class _Call(Future[Any]):
    """A call's future; waiting for it does the work."""

    def __init__(self, engine: InProcess, finish: Finish, waiting: int) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self.finish = finish
        self.outputs: dict[str, Tensor] = {}
        self.waiting = waiting
        self._engine = engine

    def result(self, timeout: float | None = None) -> Any:
        """Run until the call is over, however long that takes."""
        self._engine.drive(self)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Run until the call is over, however long that takes."""
        self._engine.drive(self)
        return super().exception(timeout)


def _place(worker: Worker) -> str:
    step = worker.at
    task = f" in supertask {step.task!r}" if step is not None else ""
    return f"on device slot {worker.slot.name!r} (rank {worker.slot.rank}){task}"


@contextmanager
def computing_threads(count: int) -> Iterator[None]:
    """Compute with so many threads in the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
