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
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import NamedTuple

import msgspec
from torch import Tensor

from shardwright.comm.collectives import concatenate, even_sizes, piece_shape, pieces, reduce
from shardwright.comm.transport import Operation, TensorSpec, contiguous_spec
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
_Received = Generator[Round, Mapping[int, Tensor], Tensor]


def exchange(operation: Operation, member: int, tensor: Tensor | None) -> Exchange:
    """The rounds of one member; ``tensor`` is None where it gives nothing."""
    if tensor is None:
        return _receive(operation, member)
    return _KINDS[operation.kind](operation, member, tensor)


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


def _receive(operation: Operation, member: int) -> Exchange:
    """A member that gives nothing takes what the one that does sends: recv, broadcast."""
    spec = operation.gotten(member)
    if operation.kind == "send":
        received = yield Round(incoming={0: spec})
        return received[0]
    assert operation.root is not None, "others that give nothing have a root"
    received = yield Round(incoming={operation.root: spec.contiguous})
    return received[operation.root]


def _send(operation: Operation, member: int, tensor: Tensor) -> Exchange:
    """As the receiver declares it, so that it need not be copied there."""
    yield Round((Message(tensor, operation.gotten(1), (1,)),))
    return None


def _broadcast(operation: Operation, member: int, tensor: Tensor) -> Exchange:
    """The same for all, whatever each declares."""
    yield Round((_to_peers(operation, member, tensor),))
    return tensor


def _reduce(operation: Operation, member: int, tensor: Tensor) -> Exchange:
    spec = plain(tensor)
    if member != operation.root:
        yield Round([Message(tensor, spec, (operation.root or 0,))])
        return None
    received = yield Round(incoming=dict.fromkeys(peers_of(operation, member), spec))
    return reduce(operation, _ordered(received, member, tensor))


def _all_reduce(operation: Operation, member: int, tensor: Tensor) -> Exchange:
    """Reduce one part each and pass it on; two members reduce the whole, in one round."""
    if operation.size == 2:
        total = yield from reduce_whole(operation, member, tensor)
        return total
    flat = tensor.reshape(-1)
    parts = list(flat.split(even_sizes(flat.numel(), operation.size)))
    mine = yield from _reduce_parts(operation, member, parts)
    incoming = {peer: plain(parts[peer]) for peer in peers_of(operation, member)}
    received = yield Round([_to_peers(operation, member, mine)], incoming)
    out = flat.new_empty(flat.shape)
    for part, content in zip(
        out.split([p.numel() for p in parts]), _ordered(received, member, mine), strict=True
    ):
        part.copy_(content)
    return out.view(tensor.shape)


def reduce_whole(operation: Operation, member: int, tensor: Tensor) -> Exchange:
    """The rounds of an all_reduce in which every member reduces what all give."""
    incoming = dict.fromkeys(peers_of(operation, member), plain(tensor))
    received = yield Round([_to_peers(operation, member, tensor)], incoming)
    return reduce(operation, _ordered(received, member, tensor))


def _reduce_scatter(operation: Operation, member: int, tensor: Tensor) -> Exchange:
    total = yield from _reduce_parts(operation, member, pieces(operation, member, tensor))
    return total


def _reduce_parts(operation: Operation, member: int, parts: Sequence[Tensor]) -> _Received:
    """Part ``i`` goes to member ``i``; this member reduces what it gets of its own part."""
    peers = peers_of(operation, member)
    received = yield Round(one_each(parts, peers), dict.fromkeys(peers, plain(parts[member])))
    return reduce(operation, _ordered(received, member, parts[member]))


def _all_gather(operation: Operation, member: int, tensor: Tensor) -> Exchange:
    incoming = {peer: operation.given(peer).contiguous for peer in peers_of(operation, member)}
    received = yield Round([_to_peers(operation, member, tensor)], incoming)
    return concatenate(operation, _ordered(received, member, tensor))


def _all_to_all(operation: Operation, member: int, tensor: Tensor) -> Exchange:
    cut = pieces(operation, member, tensor)
    peers = peers_of(operation, member)
    incoming = {
        peer: TensorSpec(piece_shape(operation, peer, member), tensor.dtype) for peer in peers
    }
    received = yield Round(one_each(cut, peers), incoming)
    return concatenate(operation, _ordered(received, member, cut[member]))


_KINDS: dict[str, Callable[[Operation, int, Tensor], Exchange]] = {
    "send": _send,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}


def peers_of(operation: Operation, member: int) -> list[int]:
    """The other members."""
    return [peer for peer in range(operation.size) if peer != member]


def _to_peers(operation: Operation, member: int, tensor: Tensor) -> Message:
    """The same for every other member."""
    return Message(tensor, plain(tensor), peers_of(operation, member))


def one_each(parts: Sequence[Tensor], peers: Sequence[int]) -> list[Message]:
    """Part ``i`` for member ``i``."""
    return [Message(parts[peer], plain(parts[peer]), (peer,)) for peer in peers]


def _ordered(received: Mapping[int, Tensor], member: int, own: Tensor) -> list[Tensor]:
    """One tensor a member, in the members' order."""
    return [own if i == member else received[i] for i in range(len(received) + 1)]


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
