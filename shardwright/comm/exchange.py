"""Each kind of communication as rounds of messages between its members.

In comes an operation, a member of it and the tensor that the member gives; out comes a generator
that yields one `Round` after another (what to send to whom, what to await from whom), takes what
has arrived, and returns what the member gets. It knows nothing of how messages travel.

What always holds: both ends of a message know its `TensorSpec` beforehand, so messages carry bytes
and nothing else; the arithmetic is that of `collectives`, in the same order, so that the result has
the same bits. Bytes a member sends, for a tensor of ``b`` bytes in a group of ``n``: all_reduce
``2 b (n-1)/n``, reduce_scatter and all_to_all ``b (n-1)/n``, all_gather ``b (n-1)``, reduce ``b``,
and a broadcasting root ``b (n-1)``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from shardwright.comm.collectives import concatenate, even_sizes, piece_shape, pieces, reduce
from shardwright.comm.operation import Operation, TensorSpec


@dataclass(frozen=True, slots=True)
class Parcel:
    """A tensor on its way, and how both ends lay it out."""

    tensor: Tensor
    spec: TensorSpec


@dataclass(frozen=True, slots=True)
class Round:
    """Messages that may all be under way at once, by the member they go to or come from."""

    outgoing: Mapping[int, Parcel] = field(default_factory=dict)
    incoming: Mapping[int, TensorSpec] = field(default_factory=dict)


Exchange = Generator[Round, Mapping[int, Tensor], Tensor | None]
_Received = Generator[Round, Mapping[int, Tensor], Tensor]


def exchange(operation: Operation, member: int, tensor: Tensor | None) -> Exchange:
    """The rounds of one member; ``tensor`` is None where it gives nothing."""
    if tensor is None:
        return _receive(operation, member)
    return _KINDS[operation.kind](operation, member, tensor)


def _receive(operation: Operation, member: int) -> Exchange:
    """A member that gives nothing takes what the one that does sends: recv, broadcast."""
    source = operation.root or 0
    received = yield Round(incoming={source: operation.gotten(member)})
    return received[source]


def _send(operation: Operation, member: int, tensor: Tensor) -> Exchange:
    yield Round(
        {peer: Parcel(tensor, operation.gotten(peer)) for peer in _peers(operation, member)}
    )
    return tensor


def _reduce(operation: Operation, member: int, tensor: Tensor) -> Exchange:
    spec = _plain(tensor)
    if member != operation.root:
        yield Round({operation.root or 0: Parcel(tensor, spec)})
        return None
    received = yield Round(incoming=dict.fromkeys(_peers(operation, member), spec))
    return reduce(operation, _ordered(received, member, tensor))


def _all_reduce(operation: Operation, member: int, tensor: Tensor) -> Exchange:
    """Reduce one part each and pass it on; two members reduce the whole, in one round."""
    if operation.size == 2:
        total = yield from _reduce_parts(operation, member, [tensor] * 2)
        return total
    flat = tensor.reshape(-1)
    parts = list(flat.split(even_sizes(flat.numel(), operation.size)))
    mine = yield from _reduce_parts(operation, member, parts)
    incoming = {peer: _plain(parts[peer]) for peer in _peers(operation, member)}
    received = yield Round(_to_all(operation, member, mine), incoming)
    out = flat.new_empty(flat.shape)
    for part, content in zip(
        out.split([p.numel() for p in parts]), _ordered(received, member, mine), strict=True
    ):
        part.copy_(content)
    return out.view(tensor.shape)


def _reduce_scatter(operation: Operation, member: int, tensor: Tensor) -> Exchange:
    total = yield from _reduce_parts(operation, member, pieces(operation, member, tensor))
    return total


def _reduce_parts(operation: Operation, member: int, parts: Sequence[Tensor]) -> _Received:
    """Part ``i`` goes to member ``i``; this member reduces what it gets of its own part."""
    peers = _peers(operation, member)
    outgoing = {peer: Parcel(parts[peer], _plain(parts[peer])) for peer in peers}
    received = yield Round(outgoing, dict.fromkeys(peers, _plain(parts[member])))
    return reduce(operation, _ordered(received, member, parts[member]))


def _all_gather(operation: Operation, member: int, tensor: Tensor) -> Exchange:
    incoming = {peer: _packed(operation.given(peer)) for peer in _peers(operation, member)}
    received = yield Round(_to_all(operation, member, tensor), incoming)
    return concatenate(operation, _ordered(received, member, tensor))


def _all_to_all(operation: Operation, member: int, tensor: Tensor) -> Exchange:
    cut = pieces(operation, member, tensor)
    peers = _peers(operation, member)
    incoming = {
        peer: TensorSpec(piece_shape(operation, peer, member), tensor.dtype) for peer in peers
    }
    outgoing = {peer: Parcel(cut[peer], _plain(cut[peer])) for peer in peers}
    received = yield Round(outgoing, incoming)
    return concatenate(operation, _ordered(received, member, cut[member]))


_KINDS: dict[str, Callable[[Operation, int, Tensor], Exchange]] = {
    "send": _send,
    "broadcast": _send,
    "reduce": _reduce,
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}


def _peers(operation: Operation, member: int) -> list[int]:
    return [peer for peer in range(operation.size) if peer != member]


def _to_all(operation: Operation, member: int, tensor: Tensor) -> dict[int, Parcel]:
    return dict.fromkeys(_peers(operation, member), Parcel(tensor, _plain(tensor)))


def _ordered(received: Mapping[int, Tensor], member: int, own: Tensor) -> list[Tensor]:
    """One tensor a member, in the members' order."""
    return [own if i == member else received[i] for i in range(len(received) + 1)]


def _plain(tensor: Tensor) -> TensorSpec:
    """The spec of a tensor's shape and dtype, laid out contiguously."""
    return TensorSpec(tuple(tensor.shape), tensor.dtype)


def _packed(spec: TensorSpec) -> TensorSpec:
    return TensorSpec(spec.shape, spec.dtype)
