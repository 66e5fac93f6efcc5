"""All slots in this process and this thread: for debugging, checking, and pipelines of one slot.

The slots take turns, a piece of work each, so calls stream through the slots just as they do
between processes, with the same bits. Work is done when a future is asked for its result. What a
step raises is the cause of the error that comes out, which is the one that processes give.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from shardwright.comm.loopback import Loopback, LoopbackTransport
from shardwright.engine.generator import Slices
from shardwright.engine.slot import torch_device
from shardwright.launch.backend import Backend
from shardwright.launch.protocol import EngineOptions, Request, describe_failure, worker_error
from shardwright.launch.worker import SlotLinks, SlotWorker
from shardwright.pipeline import Document, Pipeline
from shardwright.profiling.clock import computing_threads


class InProcess(Backend):
    """A worker a slot, driven by the caller that waits for a result."""

    def __init__(self, pipeline: Pipeline, options: EngineOptions) -> None:
        super().__init__(pipeline, options)
        self._driving = threading.RLock()
        self._loopbacks: dict[int, Loopback] = {}
        message, tensors = self._load_message(0, pipeline, {})
        self._workers: dict[str, SlotWorker] = {}
        for slot in self._slots:
            self._workers[slot] = SlotWorker(slot, message, tensors[slot], self._connect(slot))

    def close(self, *, abort: bool) -> None:
        """Finish what is under way, unless ``abort``."""
        with self._driving:
            if not abort:
                self._wait_for_pending()
            self._forget()

    def drive(self, wanted: Future[Any]) -> None:
        """Let the slots take turns until a future is done; one thread at a time does."""
        with self._driving, computing_threads(self._options.threads):
            while not wanted.done():
                moved = [self._advance(slot) for slot in self._slots]
                assert any(moved) or wanted.done(), "a checked pipeline does not deadlock"

    def _check_running(self) -> None:
        """Nothing ends workers that go on after a failure."""

    def _new_future(self) -> Future[Any]:
        return _DrivenFuture(self)

    def _send(self, message: Request, tensors: Slices) -> None:
        with self._driving:
            for slot, worker in self._workers.items():
                worker.take((message, tensors.get(slot, {})))

    def _connect(self, slot: str) -> Callable[[Document], SlotLinks]:
        """What links a slot to the others of its program."""

        def connect(document: Document) -> SlotLinks:
            loopback = self._loopbacks.setdefault(id(document), Loopback())
            return SlotLinks(
                LoopbackTransport(loopback, torch_device(slot, document.devices[slot]))
            )

        return connect

    def _advance(self, slot: str) -> bool:
        worker = self._workers[slot]
        try:
            moved = worker.advance()
        except Exception as error:
            failed = describe_failure(error, worker.at)
            raised = worker_error(failed, worker.slot.rank, slot, remote=False)
            raised.__cause__ = error
            self._fail_pending(raised)
            self._forget()
            return True
        while (outcome := worker.outcome()) is not None:
            done, tensors = outcome
            self._complete(slot, done, {name: tensor.cpu() for name, tensor in tensors.items()})
        return moved

    def _forget(self) -> None:
        """All under way is over; later calls start anew."""
        self._pending.clear()
        for loopback in self._loopbacks.values():
            loopback.clear()
        for worker in self._workers.values():
            worker.reset()


class _DrivenFuture(Future[Any]):
    """A future that does the work when it is asked for its result, however long that takes."""

    def __init__(self, backend: InProcess) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self._backend = backend

    def result(self, timeout: float | None = None) -> Any:
        """Run until the work is done."""
        self._backend.drive(self)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Run until the work is done."""
        self._backend.drive(self)
        return super().exception(timeout)
