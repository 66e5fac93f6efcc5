"""Every kind of communication, for every dtype and any sizes, as messages between ranks.

`GlooTransport` runs the rounds of `exchange` over a `Post`. gloo's own collectives lack i16, f8,
uneven pieces and an order of additions that one can count on. Pairs of ranks have all of it, need
no process group for each set of members, and give the bits of the in-process transport.

Tensors on an accelerator pass through host memory here; `native` keeps them on the device.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.comm.exchange import Parcel, Round, exchange
from shardwright.comm.messages import Address, Arrived, Post, Sent
from shardwright.comm.operation import Membership, Operation, TensorSpec
from shardwright.comm.transport import Interval, Notify, Pending, Transport
from shardwright.comm.wire import conform, pack, unpack


class GlooTransport(Transport):
    """A rank's access to a gloo process group of all ranks."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        rank: int,
        operations: Iterable[Operation],
        notify: Notify,
        device: torch.device | None = None,
    ) -> None:
        sources, destinations = _neighbours(rank, operations)
        self._post = Post(group, sources, destinations, notify)
        self._device = device or torch.device("cpu")

    def start(self, membership: Membership, call: int, tensor: Tensor | None) -> Pending:
        """Post the messages of the first round."""
        return _MessagePending(self._post, self._device, membership, call, tensor)

    def close(self) -> None:
        """Say goodbye to the other ranks, and wait for theirs."""
        self._post.close()

    def abort(self) -> None:
        """Cut the connections of all ranks to this one."""
        self._post.abort()


class _MessagePending(Pending):
    """A member on its way through the rounds of an exchange."""

    def __init__(
        self,
        post: Post,
        device: torch.device,
        membership: Membership,
        call: int,
        tensor: Tensor | None,
    ) -> None:
        self._post = post
        self._device = device
        self._operation = membership.operation
        self._member = membership.member
        self._call = call
        self._steps = exchange(self._operation, self._member, tensor)
        self._turn = -1
        self._round = Round()
        self._sent: list[Sent] = []
        self._arrivals: list[Interval] = []
        self._finished = False
        self._result: Tensor | None = None
        self._step(None)

    def ready(self) -> bool:
        """Go through as many rounds as messages have arrived for."""
        while not self._finished and self._round_is_complete():
            self._step(self._take())
        return self._finished

    def result(self) -> Tensor | None:
        """The member's share, in the layout that the pipeline declares for it."""
        spec = self._operation.outputs[self._member]
        result, self._result = self._result, None
        return conform(result, spec) if spec is not None and result is not None else None

    def interval(self) -> Interval | None:
        """From the first byte on its way to the last."""
        intervals = list(self._arrivals)
        for sent in self._sent:
            if sent.error is not None:
                raise sent.error
            if sent.interval is None:
                return None
            intervals.append(sent.interval)
        return Interval(min(i.start for i in intervals), max(i.end for i in intervals))

    def _step(self, received: dict[int, Tensor] | None) -> None:
        """Hand a round's tensors over and post the next round's messages."""
        self._turn += 1
        try:
            # A generator takes None first.
            self._round = self._steps.send(received)  # type: ignore[arg-type]
        except StopIteration as stop:
            self._finished, self._result = True, stop.value
            return
        for peer, parcel in self._round.outgoing.items():
            content = _host_bytes(parcel)
            rank, address = self._address(peer)
            self._sent.append(self._post.send(rank, address, content))

    def _round_is_complete(self) -> bool:
        return all(self._post.has(*self._address(peer)) for peer in self._round.incoming)

    def _take(self) -> dict[int, Tensor]:
        tensors = {}
        for peer, spec in self._round.incoming.items():
            arrived = self._post.take(*self._address(peer))
            self._arrivals.append(arrived.interval)
            tensors[peer] = self._tensor(arrived, spec)
        return tensors

    def _tensor(self, arrived: Arrived, spec: TensorSpec) -> Tensor:
        return unpack(arrived.content.to(self._device, non_blocking=True), spec)

    def _address(self, peer: int) -> tuple[int, Address]:
        address = Address(self._operation.tag, self._call, self._turn)
        return self._operation.ranks[peer], address


def _host_bytes(parcel: Parcel) -> Tensor:
    """A parcel's bytes in host memory, pinned where they come from a CUDA device."""
    content = pack(conform(parcel.tensor, parcel.spec), parcel.spec)
    if content.device.type == "cpu":
        return content
    pinned = torch.empty_like(content, device="cpu", pin_memory=content.is_cuda)
    return pinned.copy_(content)


def _neighbours(rank: int, operations: Iterable[Operation]) -> tuple[set[int], set[int]]:
    """The ranks that send to this one, and those it sends to."""
    sources, destinations = set(), set()
    for operation in operations:
        if rank in operation.ranks:
            others = set(operation.ranks) - {rank}
            member = operation.ranks.index(rank)
            if operation.inputs[member] is not None:
                destinations |= others
            if operation.outputs[member] is not None:
                sources |= others
    return sources, destinations
