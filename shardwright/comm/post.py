"""Messages between ranks: what the rounds of an `exchange` need of whatever carries them.

A message has an address that both ends know beforehand, and so is its `TensorSpec`. `gloo` carries
messages anywhere, `shared` between the processes of one host.

What always holds: a pair of ranks moves its messages in the order they were sent; a rank that is
gone makes `Post.has` raise for what it has not sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from shardwright.comm.exchange import Parcel
from shardwright.comm.spec import TensorSpec
from shardwright.errors import WorkerError


class Address(NamedTuple):
    """Which message of a pair of ranks: its group's tag, its call, its round."""

    tag: int
    call: int
    round: int


class Arrived(NamedTuple):
    """A message's tensor, and from when to when it travelled, monotonic."""

    tensor: Tensor
    start: float
    end: float


class Sent:
    """A message that was handed over; ``end`` is None until all of it has left."""

    __slots__ = ("end", "error", "start")

    def __init__(self, start: float) -> None:
        self.start = start
        self.end: float | None = None
        self.error: WorkerError | None = None


class Post(ABC):
    """This rank's messages to and from some others."""

    @abstractmethod
    def send(self, ranks: Sequence[int], address: Address, parcel: Parcel) -> Sequence[Sent]:
        """Post the same message to each of some ranks; its tensor must not change until it has
        left. Gives one `Sent` a rank. Raises WorkerError where a rank is gone.
        """

    @abstractmethod
    def has(self, rank: int, address: Address) -> bool:
        """Whether a message is there. Raises WorkerError where it cannot come any more."""

    @abstractmethod
    def take(self, rank: int, address: Address, spec: TensorSpec) -> Arrived:
        """A message that is there; the post forgets it. Its tensor is only to be read."""

    @abstractmethod
    def close(self) -> None:
        """End in good order: what was sent still arrives."""

    @abstractmethod
    def abort(self) -> None:
        """Cut the connections at once, so that whoever waits for this rank fails."""
