"""What a worker asks of a transport: start a communication, and learn when it is over.

`Transport.start` hands in this member's tensor and gives back a `Pending`; nothing blocks. A
worker asks ``ready`` and goes on with other work meanwhile. With nothing to do it sleeps in `wait`,
until an answer may have changed or its bell rings: a descriptor that others make readable, as do
the threads of a transport that has some (``notify``).

What always holds: operations are told apart by group and call, so several may be under way at
once. A worker starts those of one group in the order of their calls; of different groups it starts
what is there first, so two members may start them in different orders, and none may wait for
another to be taken. A transport with ``in_order`` needs more: each member starts its operations in
the file's order, one call after the other.
"""

from __future__ import annotations

import select
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
        """What the member gets, None where it gets nothing; once, and only when `ready`.

        Only to be read: other members may have the same memory.
        """

    @abstractmethod
    def interval(self) -> Interval | None:
        """When bytes were on their way; None as long as some that the member sends still are."""


class Transport(ABC):
    """Moves tensors between the members of operations."""

    in_order: bool = False

    @abstractmethod
    def start(self, membership: Membership, call: int, tensor: Tensor | None) -> Pending:
        """Take part in an operation of a call with what the member gives, None for nothing."""

    def wait(self, bell: int, timeout: float | None) -> bool:
        """Sleep until some `Pending` may have become ready or ``bell``, a descriptor, is readable.

        False where nothing of that happened for ``timeout`` seconds; None is for ever.
        """
        poll = select.poll()
        poll.register(bell, select.POLLIN)
        return bool(poll.poll(None if timeout is None else 1e3 * timeout))

    @abstractmethod
    def close(self) -> None:
        """Let go of connections and threads; waits for nothing but what is already on its way."""

    @abstractmethod
    def abort(self) -> None:
        """Cut the connections at once, so that whoever waits for this member fails."""
