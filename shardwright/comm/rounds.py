"""Collectives as rounds of messages between their members, over `Endpoint`s that carry them.

`exchange` turns an operation, a member of it and the tensor that the member gives into a generator
that yields one `Round` after another (what to send to whom, what to await from whom), takes what
has arrived, and returns what the member gets. It knows nothing of how messages travel: `gloo`
carries them anywhere, `shared_memory` between the processes of one host, and `combine` hands them
on in one process.

Both ends of a message know its address and its `TensorSpec` beforehand, so messages carry bytes and
nothing else; the arithmetic is that of `collectives`, in the same order, so that the result has the
same bits. Bytes a member sends, for a tensor of ``b`` bytes in a group of ``n``: all_reduce
``2 b (n-1)/n``, reduce_scatter and all_to_all ``b (n-1)/n``, all_gather ``b (n-1)``, reduce ``b``,
and a broadcasting root ``b (n-1)``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
from torch import Tensor

from shardwright.comm.collectives import assemble, pieces, reduce
from shardwright.comm.transport import Operation, TensorSpec, contiguous_spec
from shardwright.communication import even_sizes
from shardwright.errors import WorkerError


class Message(msgspec.Struct, frozen=True):
    """A tensor on its way to some members, and how all ends lay it out."""

    tensor: Tensor
    spec: TensorSpec
    to: Sequence[int]


class Round(msgspec.Struct, frozen=True):
    """Messages that may all be under way at once; what comes in stands by the member it is from."""

    outgoing: Sequence[Message] = ()
    incoming: Mapping[int, TensorSpec] = {}


Exchange = Generator[Round, Mapping[int, Tensor], Tensor | None]


def exchange(operation: Operation, member: int, tensor: Tensor | None) -> Exchange:
    """The rounds of one member; ``tensor`` is None where it gives nothing."""
    if operation.kind == "all_reduce" and operation.size > 2:
        assert tensor is not None, "every member of an all_reduce gives a tensor"
        return _all_reduce(operation, member, tensor)
    return exchange_at_once(operation, member, tensor)


def combine(operation: Operation, inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
    """What every member gets when member ``i`` gives ``inputs[i]``: all rounds in one process.

    ``inputs`` and the result have one entry a member, None where it gives or gets nothing.
    """
    members = {i: exchange(operation, i, tensor) for i, tensor in enumerate(inputs)}
    outputs: list[Tensor | None] = [None] * operation.size
    received: dict[int, dict[int, Tensor]] = {}
    while members:
        rounds: dict[int, Round] = {}
        for member, generator in members.items():
            try:
                # A generator takes None first.
                rounds[member] = generator.send(received.get(member))  # type: ignore[arg-type]
            except StopIteration as stop:
                outputs[member] = stop.value if operation.outputs[member] is not None else None
        members = {member: members[member] for member in rounds}
        sent = {
            (member, peer): message.tensor
            for member, turn in rounds.items()
            for message in turn.outgoing
            for peer in message.to
        }
        received = {
            member: {peer: sent[peer, member] for peer in turn.incoming}
            for member, turn in rounds.items()
        }
    return outputs


def exchange_at_once(operation: Operation, member: int, tensor: Tensor | None) -> Exchange:
    """One round, in which each member that gives something sends each other its piece of it."""
    specs, givers = operation.pieces, operation.givers
    gets = operation.outputs[member] is not None
    own, outgoing = tensor, []
    if tensor is not None:
        peers = [peer for peer in operation.receivers if peer != member]
        if operation.cut is not None:
            parts = pieces(operation, member, tensor)
            own, outgoing = parts[member], one_each(parts, peers)
        elif peers:
            outgoing = [Message(tensor, specs[member][0], peers)]
    incoming = {peer: specs[peer][member] for peer in givers if gets and peer != member}
    received = yield Round(outgoing, incoming)
    return assemble(operation, _ordered(received, member, own, givers)) if gets else None


def _all_reduce(operation: Operation, member: int, tensor: Tensor) -> Exchange:
    """Reduce one part each and pass it on."""
    flat = tensor.reshape(-1)
    parts = list(flat.split(even_sizes(flat.numel(), operation.size)))
    members, peers = range(operation.size), peers_of(operation, member)
    received = yield Round(one_each(parts, peers), dict.fromkeys(peers, plain(parts[member])))
    mine = reduce(operation, _ordered(received, member, parts[member], members))
    incoming = {peer: plain(parts[peer]) for peer in peers}
    received = yield Round([Message(mine, plain(mine), peers)], incoming)
    out = flat.new_empty(flat.shape)
    whole = _ordered(received, member, mine, members)
    for part, content in zip(out.split([p.numel() for p in parts]), whole, strict=True):
        part.copy_(content)
    return out.view(tensor.shape)


def peers_of(operation: Operation, member: int) -> list[int]:
    """The other members."""
    return [peer for peer in range(operation.size) if peer != member]


def one_each(parts: Sequence[Tensor], peers: Sequence[int]) -> list[Message]:
    """Part ``i`` for member ``i``."""
    return [Message(parts[peer], plain(parts[peer]), (peer,)) for peer in peers]


def _ordered(
    received: Mapping[int, Tensor], member: int, own: Tensor | None, givers: Iterable[int]
) -> list[Tensor]:
    """One tensor a member that gives, in the members' order."""
    tensors = [own if giver == member else received[giver] for giver in givers]
    return [tensor for tensor in tensors if tensor is not None]


def plain(tensor: Tensor) -> TensorSpec:
    """The spec of a tensor's shape and dtype, laid out contiguously."""
    return contiguous_spec(tensor.shape, tensor.dtype)


class Address(NamedTuple):
    """Which message of a pair of ranks: its group's tag, its call, its round."""

    tag: int
    call: int
    round: int


class RecvCompletion(NamedTuple):
    """A message's tensor, and from when to when it travelled, monotonic."""

    tensor: Tensor
    start: float
    end: float


class SendCompletion:
    """A message that was handed over; ``end`` is None until all of it has left."""

    __slots__ = ("end", "error", "start")

    def __init__(self, start: float) -> None:
        self.start = start
        self.end: float | None = None
        self.error: WorkerError | None = None


class Endpoint(ABC):
    """This rank's messages to and from some others."""

    @abstractmethod
    def send(
        self, ranks: Sequence[int], address: Address, message: Message
    ) -> Sequence[SendCompletion]:
        """Post the same message to each of some ranks; its tensor must not change until it has
        left. Gives one `SendCompletion` a rank. Raises WorkerError where a rank is gone.
        """

    @abstractmethod
    def has(self, rank: int, address: Address) -> bool:
        """Whether a message is there. Raises WorkerError where it cannot come any more."""

    @abstractmethod
    def take(self, rank: int, address: Address, spec: TensorSpec) -> RecvCompletion:
        """A message that is there; the endpoint forgets it. Its tensor is only to be read."""

    @abstractmethod
    def close(self) -> None:
        """End in good order: what was sent still arrives."""

    @abstractmethod
    def abort(self) -> None:
        """Cut the connections at once, so that those that wait for this rank fail."""
