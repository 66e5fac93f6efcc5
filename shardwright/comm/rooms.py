"""Collectives in a room: one result in shared memory, each part written by one member, seen by all.

Where members share memory, a gathered or reduced tensor need not be put together by each of them.
The first member lends a blank tensor, the room; every member writes its part of the result there
and says so to the others; what all get is the room itself.

In comes an operation whose members all share memory, and out come rounds as from `exchange`, with
the same arithmetic in the same order and so the same bits. To say so takes one round more: a small
tensor goes the shorter way, on which each member reads what all others give.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardwright.comm.collectives import even_sizes, reduce
from shardwright.comm.exchange import (
    Exchange,
    Parcel,
    Round,
    exchange,
    one_each,
    peers_of,
    plain,
    reduce_whole,
)
from shardwright.comm.operation import Operation
from shardwright.comm.spec import TensorSpec

LARGE = 256 << 10
"""Bytes of a result from which on a room is worth its additional round."""

Room = Callable[[Sequence[int], TensorSpec], Parcel]
"""Makes a parcel of a blank tensor that the sender and the members it goes to may write to."""


def exchange_in_room(
    operation: Operation, member: int, tensor: Tensor | None, room: Room
) -> Exchange:
    """The rounds of one member that shares memory with all others."""
    if tensor is None or operation.kind not in _KINDS:
        return exchange(operation, member, tensor)
    small, large = _KINDS[operation.kind]
    if operation.gotten(member).contiguous.nbytes < LARGE:
        return small(operation, member, tensor)
    return large(operation, member, tensor, room)


def _all_gather(operation: Operation, member: int, tensor: Tensor, room: Room) -> Exchange:
    """Everyone copies what it gives to its place in the room."""
    spec = operation.gotten(member).contiguous
    if member == 0:
        parcel = room(peers_of(operation, member), spec)
        yield Round([parcel])
        whole = parcel.tensor
    else:
        received = yield Round(incoming={0: spec})
        whole = received[0]
    assert operation.dim is not None
    sizes = [operation.given(i).shape[operation.dim] for i in range(operation.size)]
    whole.split(sizes, operation.dim)[member].copy_(tensor)
    yield _written(operation, member)
    return whole


def _all_reduce(operation: Operation, member: int, tensor: Tensor, room: Room) -> Exchange:
    """Everyone reduces one part, in the room; what the first member gives of it is there before."""
    flat = tensor.reshape(-1)
    sizes = even_sizes(flat.numel(), operation.size)
    given = flat.split(sizes)
    peers = peers_of(operation, member)
    incoming = dict.fromkeys(peers, plain(given[member]))
    if member == 0:
        parcel = room(peers, plain(flat))
        whole = parcel.tensor
        part = whole[: sizes[0]]
        whole[sizes[0] :].copy_(flat[sizes[0] :])
        tensors = dict((yield Round([parcel], incoming)))
    else:
        tensors = dict((yield Round(one_each(given, peers), {**incoming, 0: plain(flat)})))
        whole = tensors[0]
        part = tensors[0] = whole.split(sizes)[member]
    tensors[member] = given[member]
    reduce(operation, [tensors[i] for i in range(operation.size)], out=part)
    tensors.clear()
    yield _written(operation, member)
    return whole.view(tensor.shape)


def _written(operation: Operation, member: int) -> Round:
    """Everyone tells everyone, by an empty message, that its part is written."""
    nothing = torch.empty(0, dtype=torch.uint8)
    peers = peers_of(operation, member)
    return Round([Parcel(nothing, plain(nothing), peers)], dict.fromkeys(peers, plain(nothing)))


_Small = Callable[[Operation, int, Tensor], Exchange]
_Large = Callable[[Operation, int, Tensor, Room], Exchange]

_KINDS: dict[str, tuple[_Small, _Large]] = {
    "all_gather": (exchange, _all_gather),
    "all_reduce": (reduce_whole, _all_reduce),
}
