"""All slots in this process and this thread: for debugging, checking, and pipelines of one slot.

The slots take turns, a step each, so calls stream through the slots just as they do between
processes, with the same bits. Work is done when somebody asks a future for its result. What a step
raises is the cause of the error that comes out, which is the one that processes give.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from shardwright.comm.loopback import Loopback, LoopbackTransport
from shardwright.engine.generator import Slices
from shardwright.engine.program import constants_of
from shardwright.engine.slot import LoadedSlot, torch_device
from shardwright.engine.slot_engine import Finished, SlotEngine
from shardwright.engine.timeline import Event
from shardwright.launch.backend import Backend, Finish, settle
from shardwright.launch.failures import failed, failure
from shardwright.launch.host import Answer, Call, Host, Item, Load, Reply, Request
from shardwright.launch.making import Options, make_worker
from shardwright.pipeline import Pipeline
from shardwright.profiling.clock import computing_threads


class InProcess(Backend):
    """A host a slot, driven by whoever waits for a result."""

    def __init__(self, pipeline: Pipeline, *, threads: int, options: Options) -> None:
        self._threads = threads
        self._options = options
        self._lock = threading.RLock()
        board = Loopback()
        self._loopbacks = [board]
        self._hosts = [Host(self._worker(pipeline, name, {}, board)) for name in pipeline.devices]
        self._calls: dict[int, _Call] = {}
        self._events: list[Event] = []

    def begin(self, call: int, inputs: Slices, finish: Finish, *, pipeline: int = 0) -> Future[Any]:
        """Queue a call; it runs when a result is asked for."""
        items = [Call(call, inputs[host.slot.name], pipeline) for host in self._hosts]
        return self._take(call, finish, items)

    def load(
        self, call: int, number: int, pipeline: Pipeline, shared: Mapping[str, str]
    ) -> Future[Any]:
        """Queue the making of another pipeline's workers."""
        board = Loopback()
        self._loopbacks.append(board)

        def make(slot: LoadedSlot) -> SlotEngine:
            names = constants_of(pipeline, slot.name)
            mine = {name: slot.constants[shared[name]] for name in names if name in shared}
            return self._worker(pipeline, slot.name, mine, board)

        return self._take(call, None, [Load(call, number, make)] * len(self._hosts))

    def ask(
        self, call: int, function: str, arguments: Any, tensors: Slices
    ) -> Future[dict[str, Reply]]:
        """Queue a request to every slot; they do it one after another."""
        items = [
            Request(call, function, arguments, tensors.get(host.slot.name, {}))
            for host in self._hosts
        ]
        return self._take(call, None, items)

    def events(self) -> Sequence[Event]:
        """The events of finished calls."""
        return self._events

    def close(self, *, abort: bool) -> None:
        """Finish calls under way, unless ``abort``."""
        with self._lock:
            while self._calls and not abort:
                self.drive(next(iter(self._calls.values())))
            self._forget()

    def drive(self, wanted: Future[Any]) -> None:
        """Let the slots take turns until a call is over; one thread at a time does."""
        with self._lock, computing_threads(self._threads):
            while not wanted.done():
                moved = [self._advance(host) for host in self._hosts]
                assert any(moved) or wanted.done(), "a checked pipeline does not deadlock"

    def _take(self, call: int, finish: Finish | None, items: Sequence[Item]) -> Future[Any]:
        """Hand a call or request to every host."""
        with self._lock:
            future = self._calls[call] = _Call(self, call, finish, len(self._hosts))
            for host, item in zip(self._hosts, items, strict=True):
                host.take(item)
        return future

    def _worker(
        self, pipeline: Pipeline, name: str, shared: Mapping[str, Tensor], board: Loopback
    ) -> SlotEngine:
        """The worker of a slot, with those of its constants that are not ``shared`` loaded."""
        infos = constants_of(pipeline, name)
        stored = {key: info for key, info in infos.items() if key not in shared}
        return make_worker(
            pipeline,
            name,
            {**pipeline.weights.load(stored), **shared},
            LoopbackTransport(board, torch_device(name, pipeline.devices[name])),
            self._options,
            shares=bool(shared),
        )

    def _advance(self, host: Host) -> bool:
        try:
            moved = host.advance()
        except Exception as error:
            told = failed(error, host.active.at)
            made = failure(told, host.slot.rank, host.slot.name, elsewhere=False)
            made.__cause__ = error
            self._fail(made)
            return True
        while (outcome := host.outcome()) is not None:
            self._collect(host.slot.name, outcome)
        return moved

    def _collect(self, slot: str, outcome: Finished | Answer) -> None:
        match outcome:
            case Finished():
                call = self._calls[outcome.call]
                self._events.extend(outcome.events)
                tensors = {name: tensor.cpu() for name, tensor in outcome.outputs.items()}
                call.outputs.update(tensors)
            case Answer():
                call = self._calls[outcome.number]
                call.replies[slot] = outcome.reply
                call.error = call.error or outcome.error
        call.waiting -= 1
        if not call.waiting:
            del self._calls[call.number]
            call.settle()

    def _fail(self, error: Exception) -> None:
        """All calls under way end with the error; later ones start anew."""
        calls = list(self._calls.values())
        self._forget()
        for call in calls:
            call.set_exception(error)

    def _forget(self) -> None:
        self._calls.clear()
        for loopback in self._loopbacks:
            loopback.clear()
        for host in self._hosts:
            host.reset()


class _Call(Future[Any]):
    """The future of a call or request; waiting for it does the work."""

    def __init__(self, engine: InProcess, number: int, finish: Finish | None, waiting: int) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self.number = number
        self.outputs: dict[str, Tensor] = {}
        self.replies: dict[str, Reply] = {}
        self.error: Exception | None = None
        self.waiting = waiting
        self._engine = engine
        self._finish = finish

    def settle(self) -> None:
        """Set the result, when all slots are done: a call's, or a request's replies by slot."""
        if self.error is not None:
            self.set_exception(self.error)
        elif self._finish is not None:
            settle(self, self._finish, self.outputs)
        else:
            self.set_result(self.replies)

    def result(self, timeout: float | None = None) -> Any:
        """Run until the call is over, however long that takes."""
        self._engine.drive(self)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Run until the call is over, however long that takes."""
        self._engine.drive(self)
        return super().exception(timeout)
