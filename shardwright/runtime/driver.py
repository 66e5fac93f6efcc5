"""What drives slots: the part that `Runner` and `Session` share.

A driver numbers what it asks of a `Backend`, in one order for all slots, and holds the backend from
start to close. It may be used by several threads of the process that made it.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from shardwright.engine.timeline import Timeline
from shardwright.errors import RunError
from shardwright.launch.backend import Backend
from shardwright.launch.host import Reply
from shardwright.launch.in_process import InProcess
from shardwright.pipeline import Pipeline


class Driver:
    """A pipeline on a backend; a context manager.

    ``in_flight`` is how many calls may be under way at once.
    """

    def __init__(self, pipeline: Pipeline, backend: Backend, in_flight: int) -> None:
        self.pipeline = pipeline
        self._backend = backend
        self._in_flight = in_flight
        self._under_way: deque[Future[Any]] = deque()
        self._numbers = itertools.count()
        self._beginning = threading.Lock()
        self._lock = threading.Lock()
        self._closed = False
        self._process = None if isinstance(backend, InProcess) else os.getpid()
        self._finalizer = weakref.finalize(self, _close, self._process, backend)

    @property
    def timeline(self) -> Timeline:
        """Who did what for how long in the calls that are over; empty without ``trace``."""
        return Timeline.of(self._backend.events())

    def close(self) -> None:
        """Finish the calls under way and end the workers."""
        self._close(abort=False)

    def call_workers(self, function: str, arguments: Any = None) -> dict[str, Any]:
        """Call a function of this package on every slot; what it returns, by slot.

        ``function`` is ``module:name`` and takes the `Slot`, ``arguments`` and a mapping of
        tensors, which is empty. It runs on the worker when all that was asked before is over.
        ``arguments`` and what it returns are plain data. An exception of any slot is raised here.
        """
        return {slot: reply.value for slot, reply in self._request(function, arguments).items()}

    def _request(
        self,
        function: str,
        arguments: Any,
        tensors: Mapping[str, dict[str, Tensor]] | None = None,
    ) -> dict[str, Reply]:
        given = dict(tensors or {})
        ask = self._backend.ask
        return self._backend.everyones(
            self._ask(lambda call: ask(call, function, arguments, given)).result()
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close(abort=kind is not None)

    def _ask(self, ask: Callable[[int], Future[Any]]) -> Future[Any]:
        """Ask something of the backend, under the next number."""
        self._check_process()
        with self._lock:
            if self._closed:
                raise RunError(f"the {type(self).__name__.lower()} is closed; make a new one")
            return ask(next(self._numbers))

    def _begin(self, begin: Callable[[int], Future[Any]]) -> Future[Any]:
        """Begin a call; waits while ``in_flight`` calls are under way.

        One thread at a time begins: whoever else wants to would have to wait as well.
        """
        self._check_process()
        with self._beginning:
            while len(self._under_way) >= self._in_flight:
                self._under_way[0].exception()
                self._under_way.popleft()
            future = self._ask(begin)
            self._under_way.append(future)
        return future

    def _check_process(self) -> None:
        """Raise RunError in a forked copy of the process that has the threads and connections."""
        if not _is_here(self._process):
            name = type(self).__name__
            raise RunError(
                f"this {name} belongs to process {self._process}, of which this one ({os.getpid()})"
                f" is a fork: its workers answer there; make a {name} in this process, or fork "
                "before you make one"
            )

    def _close(self, *, abort: bool) -> None:
        self._closed = True
        if self._finalizer.detach() is not None and _is_here(self._process):
            try:
                self._backend.close(abort=abort)
            except BaseException:
                self._backend.close(abort=True)
                raise


def _is_here(process: int | None) -> bool:
    """Whether this is the process of that number; None is every process."""
    return process is None or process == os.getpid()


def _close(process: int | None, backend: Backend) -> None:
    """Close what nobody has closed, where it is."""
    if _is_here(process):
        backend.close(abort=True)
