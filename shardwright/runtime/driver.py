"""What drives slots: the part that `Runner` and `Session` share.

A driver numbers what it asks of a `Backend`, in one order for all slots, and holds the backend from
start to close. It may be used by several threads.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from shardwright.errors import RunError
from shardwright.pipeline import Pipeline
from shardwright.runtime.backend import Backend
from shardwright.runtime.host import Reply
from shardwright.schedule.timeline import Timeline


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
        self._lock = threading.Lock()
        self._closed = False
        self._finalizer = weakref.finalize(self, backend.close, abort=True)

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
        with self._lock:
            if self._closed:
                raise RunError(f"the {type(self).__name__.lower()} is closed; make a new one")
            return ask(next(self._numbers))

    def _begin(self, begin: Callable[[int], Future[Any]]) -> Future[Any]:
        """Begin a call; waits while ``in_flight`` calls are under way."""
        with self._lock:
            while self._under_way and self._under_way[0].done():
                self._under_way.popleft()
            oldest = self._under_way[0] if len(self._under_way) >= self._in_flight else None
        if oldest is not None:
            oldest.exception()
        future = self._ask(begin)
        self._under_way.append(future)
        return future

    def _close(self, *, abort: bool) -> None:
        self._closed = True
        if self._finalizer.detach() is not None:
            try:
                self._backend.close(abort=abort)
            except BaseException:
                self._backend.close(abort=True)
                raise
