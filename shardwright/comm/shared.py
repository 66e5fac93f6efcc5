"""Messages between processes of one host, in memory that they share.

A sender copies a tensor once, into a block of its own `Arena`, and tells each receiver where it is;
the receiver's tensor is that memory itself, and the block is free when nothing uses it any more.

What always holds: nothing but `wait` waits for another rank, and whatever is called sends what
sockets did not take before; so memory and sockets that are full of what others have not read never
hold two ranks up for good. There is no thread, and all calls but `abort` come from one.
"""

from __future__ import annotations

import select
import time
from collections.abc import Collection, Sequence
from contextlib import suppress

import torch

from shardwright.comm.arena import Arena, Block
from shardwright.comm.exchange import Parcel
from shardwright.comm.link import NOWHERE, Link
from shardwright.comm.post import Address, Arrived, Post, Sent
from shardwright.comm.spec import TensorSpec
from shardwright.errors import WorkerError

_CLOSE_SECONDS = 5.0


class Placed(Parcel, frozen=True):
    """A parcel that is in the sender's arena already, lent to those that it goes to."""

    block: Block


class SharedPost(Post):
    """This rank's messages to and from the others at the ends of ``links``: all of ``ranks``.

    ``spin`` is for how many seconds `wait` looks out before it sleeps: to be woken takes longer
    than most messages do.
    """

    def __init__(self, rank: int, arena: Arena, links: Collection[Link], spin: float) -> None:
        self._rank = rank
        self._arena = arena
        self._spin = spin
        self._links = {link.rank: link for link in links}
        self._by_descriptor = {link.descriptor: link for link in links}
        self._poll = select.poll()
        self._polled: dict[int, int] = {}
        self.ranks = frozenset((rank, *self._links))

    def send(self, ranks: Sequence[int], address: Address, parcel: Parcel) -> list[Sent]:
        """Copy the tensor, unless it is `Placed`, and tell where it is; it may change then."""
        start = time.monotonic()
        offset = parcel.block.offset if isinstance(parcel, Placed) else self._copy(ranks, parcel)
        return [self._links[rank].send(address, offset, start) for rank in ranks]

    def room(self, ranks: Sequence[int], to: Sequence[int], spec: TensorSpec) -> Placed:
        """A parcel with a blank tensor that all of ``ranks`` will see, and may write to."""
        block = self._arena.lend(spec.nbytes, (*ranks, self._rank))
        tensor = self._arena.window.hold(block.offset, spec, self._rank)
        return Placed(tensor, spec, to, block)

    def has(self, rank: int, address: Address) -> bool:
        """Whether a message is there. Raises WorkerError where it cannot come any more."""
        link = self._links[rank]
        link.catch_up()
        while address not in link.arrived:
            if not link.receive():
                if link.lost is not None:
                    raise link.lost
                return False
        return True

    def take(self, rank: int, address: Address, spec: TensorSpec) -> Arrived:
        """A message that is there; its memory is held as long as the tensor's is in use."""
        link = self._links[rank]
        offset, start = link.arrived.pop(address)
        if offset == NOWHERE:
            tensor = torch.empty(spec.shape, dtype=spec.dtype)
        else:
            tensor = link.window.hold(offset, spec, self._rank)
        return Arrived(tensor, start, time.monotonic())

    def wait(self, bell: int | None, timeout: float | None) -> bool:
        """Sleep until a link has something, or there is something to read from ``bell``.

        False where nothing has come for ``timeout`` seconds.
        """
        self._set_poll(bell)
        events = self._look_out() or self._poll.poll(None if timeout is None else 1e3 * timeout)
        for descriptor, _ in events:
            link = self._by_descriptor.get(descriptor)
            if link is not None:
                link.receive()
                link.catch_up()
        return bool(events)

    def close(self) -> None:
        """Say goodbye behind everything that was sent; what others still show stays."""
        for link in self._links.values():
            with suppress(WorkerError):  # Who is gone needs no goodbye.
                link.say_goodbye()
        deadline = time.monotonic() + _CLOSE_SECONDS
        while any(link.is_late for link in self._links.values()) and time.monotonic() < deadline:
            self.wait(None, _CLOSE_SECONDS)
        self.abort()

    def abort(self) -> None:
        """Cut the connections to all ranks; memory that tensors show stays with them."""
        for link in self._links.values():
            link.close()
        self._arena.close()

    def _copy(self, ranks: Sequence[int], parcel: Parcel) -> int:
        """Copy a tensor into a block that ``ranks`` hold; gives its offset."""
        if not parcel.spec.nbytes:
            return NOWHERE
        block = self._arena.lend(parcel.spec.nbytes, ranks)
        block.write(parcel.tensor, parcel.spec)
        return block.offset

    def _look_out(self) -> list[tuple[int, int]]:
        """What there is to read, looked for without sleeping.

        Nor is the core yielded: on a busy machine, whoever yields comes last.
        """
        deadline = time.monotonic() + self._spin
        while not (events := self._poll.poll(0)):
            if time.monotonic() > deadline:
                break
        return events

    def _set_poll(self, bell: int | None) -> None:
        """Look for records, for room where some are late, and not for what is gone."""
        wanted = {} if bell is None else {bell: select.POLLIN}
        for link in self._links.values():
            if link.lost is None:
                wanted[link.descriptor] = select.POLLIN | (select.POLLOUT if link.is_late else 0)
        if wanted != self._polled:
            self._polled = wanted
            self._poll = select.poll()
            for descriptor, mask in wanted.items():
                self._poll.register(descriptor, mask)
