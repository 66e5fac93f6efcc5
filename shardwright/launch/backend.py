"""What runs a pipeline's slots: in this process, in processes of their own, or under torchrun.

A `Runner` or `Session` hands each call's inputs to a `Backend` and gets a future of its result.
What is asked is numbered, in the order in which it is asked, and each slot does it in that order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from shardwright.engine.generator import Slices
from shardwright.engine.timeline import Event
from shardwright.launch.host import Reply
from shardwright.pipeline import Pipeline

START_PATIENCE = 120.0
"""Seconds without progress that a start may have: importing torch and reading weights take time."""

Finish = Callable[[dict[str, Tensor]], Any]
"""Makes the result of a call from all pipeline outputs by name."""


class Backend(ABC):
    """Does on all slots what is asked."""

    @abstractmethod
    def begin(self, call: int, inputs: Slices, finish: Finish, *, pipeline: int = 0) -> Future[Any]:
        """Start a call; its future holds what ``finish`` makes of the outputs.

        ``pipeline`` is 0, or the number of one that was loaded.
        """

    @abstractmethod
    def load(
        self, call: int, number: int, pipeline: Pipeline, shared: Mapping[str, str]
    ) -> Future[Any]:
        """Keep ready another pipeline under a number; ``shared`` maps its constants to these."""

    @abstractmethod
    def ask(
        self, call: int, function: str, arguments: Any, tensors: Slices
    ) -> Future[dict[str, Reply]]:
        """Call a function with each slot (see `host.Request`); the future has replies by slot."""

    def everyones(self, replies: dict[str, Reply]) -> dict[str, Reply]:
        """The replies of all slots, from those of the slots that this process drives."""
        return replies

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
