"""What a worker asks of a transport: start a communication, and learn when it is over.

`Transport.start` hands in this member's tensor and gives back a `Pending`; nothing blocks. A
worker asks ``ready`` and goes on with other work meanwhile; whenever an answer may have changed
the transport calls ``notify``, from any thread, so that a worker with nothing to do can sleep.

What always holds: operations are told apart by group and call, so several calls may be under way
at once; a worker starts its operations in one order (calls in turn, supertasks as in the file) and
each member does so. A transport with ``in_order`` needs one thing more: one call is finished
before the next begins.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from shardwright.comm.operation import Membership

Notify = Callable[[], None]


class Interval(NamedTuple):
    """From when to when something took place, in seconds of `time.monotonic`."""

    start: float
    end: float


class Pending(ABC):
    """A member's part in one communication that has been started."""

    @abstractmethod
    def ready(self) -> bool:
        """Whether `result` is there. Raises what went wrong, WorkerError where a peer is gone."""

    @abstractmethod
    def result(self) -> Tensor | None:
        """What the member gets, None where it gets nothing; once, and only when `ready`."""

    @abstractmethod
    def interval(self) -> Interval | None:
        """When bytes were on their way; None as long as some that the member sends still are."""


class Transport(ABC):
    """Moves tensors between the members of operations."""

    in_order: bool = False

    @abstractmethod
    def start(self, membership: Membership, call: int, tensor: Tensor | None) -> Pending:
        """Take part in an operation of a call with what the member gives, None for nothing."""

    @abstractmethod
    def close(self) -> None:
        """Let go of connections and threads; waits for nothing but what is already on its way."""

    @abstractmethod
    def abort(self) -> None:
        """Cut the connections at once, so that whoever waits for this member fails."""
