"""What runs a pipeline's slots: in this process, in processes of their own, or under torchrun.

A `Runner` hands each call's inputs to a `Backend` and gets a future of its result.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from shardwright.runtime.generator import Slices
from shardwright.runtime.timeline import Event

START_PATIENCE = 120.0
"""Seconds without progress that a start may have: importing torch and reading weights take time."""

Finish = Callable[[dict[str, Tensor]], Any]
"""Makes the result of a call from all pipeline outputs by name."""


class Backend(ABC):
    """Runs calls on all slots; calls are numbered by the `Runner` and begin in that order."""

    @abstractmethod
    def begin(self, call: int, inputs: Slices, finish: Finish) -> Future[Any]:
        """Start a call; its future holds what ``finish`` makes of the outputs."""

    @abstractmethod
    def events(self) -> Sequence[Event]:
        """The events of finished calls, where traced."""

    @abstractmethod
    def close(self, *, abort: bool) -> None:
        """End; at once with ``abort``, else when calls under way are over. May be called twice."""


def running_future() -> Future[Any]:
    """A future that cannot be cancelled: workers cannot take a call back."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def settle(future: Future[Any], finish: Finish, outputs: dict[str, Tensor]) -> None:
    """Give a future its result, or the exception that making it raised."""
    try:
        result = finish(outputs)
    except Exception as error:
        future.set_exception(error)
    else:
        future.set_result(result)
