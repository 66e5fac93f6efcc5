"""Messages between processes of one host, in memory that they share.

A sender copies a tensor once, into a block of its own `Arena`, and tells each receiver where it is;
the receiver's tensor is that memory itself, and the block is free when nothing uses it any more.
A `PeerLink` carries the records that tell of messages, by socket: it puts a record behind the bytes
it tells of on every kind of processor, wakes who sleeps, and says at once when the process at the
other end is gone.

Nothing but `wait` waits for another rank, and whatever is called sends what sockets did not take
before; so memory and sockets that are full of what others have not read never hold two ranks up for
good. There is no thread, and all calls but `abort` come from one.

A large gathered or reduced tensor is not put together by each member: the first one lends an
in-place buffer, every member writes its part of the result there and says so to the others, and
what all get is the buffer itself. Order of arithmetic, and so the bits, are those of `exchange`.
The notice takes one round more: a small tensor goes the shorter way, on which each member reads
what all others give.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from shardwright.comm.arena import Arena, Block, Window
from shardwright.comm.collectives import reduce
from shardwright.comm.rounds import (
    Address,
    Endpoint,
    Exchange,
    Message,
    RecvCompletion,
    Round,
    SendCompletion,
    exchange,
    exchange_at_once,
    one_each,
    peers_of,
    plain,
)
from shardwright.comm.transport import Operation, TensorSpec
from shardwright.communication import even_sizes
from shardwright.errors import WorkerError

_CLOSE_SECONDS = 5.0


class InPlaceBuffer(Message, frozen=True):
    """A message that is in the sender's arena already, lent to its receivers."""

    block: Block


class SharedMemoryEndpoint(Endpoint):
    """This rank's messages to and from the others at the ends of ``links``: all of ``ranks``.

    ``spin`` is for how many seconds `wait` looks out before it sleeps: to be woken takes longer
    than most messages do.
    """

    def __init__(self, rank: int, arena: Arena, links: Collection[PeerLink], spin: float) -> None:
        self._rank = rank
        self._arena = arena
        self._spin = spin
        self._links = {link.rank: link for link in links}
        self._by_descriptor = {link.descriptor: link for link in links}
        self._poll = select.poll()
        self._polled: dict[int, int] = {}
        self.ranks = frozenset((rank, *self._links))

    def send(
        self, ranks: Sequence[int], address: Address, message: Message
    ) -> list[SendCompletion]:
        """Copy the tensor, unless it is in place, and tell where it is; it may change then."""
        start = time.monotonic()
        offset = (
            message.block.offset
            if isinstance(message, InPlaceBuffer)
            else self._copy(ranks, message)
        )
        return [self._links[rank].send(address, offset, start) for rank in ranks]

    def buffer(self, ranks: Sequence[int], to: Sequence[int], spec: TensorSpec) -> InPlaceBuffer:
        """A message with a blank tensor that all of ``ranks`` will see, and may write to."""
        block = self._arena.lend(spec.nbytes, (*ranks, self._rank))
        tensor = self._arena.window.hold(block.offset, spec, self._rank)
        return InPlaceBuffer(tensor, spec, to, block)

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

    def take(self, rank: int, address: Address, spec: TensorSpec) -> RecvCompletion:
        """A message that is there; its memory is held as long as the tensor's is in use."""
        link = self._links[rank]
        offset, start = link.arrived.pop(address)
        if offset == NOWHERE:
            tensor = torch.empty(spec.shape, dtype=spec.dtype)
        else:
            tensor = link.window.hold(offset, spec, self._rank)
        return RecvCompletion(tensor, start, time.monotonic())

    def wait(self, wakeup: int | None, timeout: float | None) -> bool:
        """Sleep until a link has something, or there is something to read from ``wakeup``.

        False where nothing has come for ``timeout`` seconds.
        """
        self._set_poll(wakeup)
        events = self._look_out() or self._poll.poll(None if timeout is None else 1e3 * timeout)
        for descriptor, _ in events:
            link = self._by_descriptor.get(descriptor)
            if link is not None:
                link.receive()
                link.catch_up()
        return bool(events)

    def close(self) -> None:
        """Shut down behind everything that was sent; what others still show stays."""
        for link in self._links.values():
            with suppress(WorkerError):  # Who is gone need not be told.
                link.shut_down()
        deadline = time.monotonic() + _CLOSE_SECONDS
        while any(link.is_late for link in self._links.values()) and time.monotonic() < deadline:
            self.wait(None, _CLOSE_SECONDS)
        self.abort()

    def abort(self) -> None:
        """Cut the connections to all ranks; memory that tensors show stays with them."""
        for link in self._links.values():
            link.close()
        self._arena.close()

    def _copy(self, ranks: Sequence[int], message: Message) -> int:
        """Copy a tensor into a block that ``ranks`` hold; gives its offset."""
        if not message.spec.nbytes:
            return NOWHERE
        block = self._arena.lend(message.spec.nbytes, ranks)
        block.write(message.tensor, message.spec)
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

    def _set_poll(self, wakeup: int | None) -> None:
        """Look for records, for buffer where some are late, and not for what is gone."""
        wanted = {} if wakeup is None else {wakeup: select.POLLIN}
        for link in self._links.values():
            if link.lost is None:
                wanted[link.descriptor] = select.POLLIN | (select.POLLOUT if link.is_late else 0)
        if wanted != self._polled:
            self._polled = wanted
            self._poll = select.poll()
            for descriptor, mask in wanted.items():
                self._poll.register(descriptor, mask)


NOWHERE = -1
"""The offset of a message without content."""

_RECORD = struct.Struct("=qqqqd")
"""Tag, call, round, offset of the content, when the sender began."""
_SHUTDOWN = _RECORD.pack(-1, 0, 0, NOWHERE, 0.0)


class PeerLink:
    """One end of a pair of sockets, and the window on the other rank's arena.

    ``arrived`` are the messages not taken yet: offset, and when the sender began. ``lost`` is why
    no more will come.
    """

    def __init__(self, rank: int, connection: socket.socket, window: Window) -> None:
        connection.setblocking(False)
        self.rank = rank
        self.window = window
        self.descriptor = connection.fileno()
        self.arrived: dict[Address, tuple[int, float]] = {}
        self.lost: WorkerError | None = None
        self._socket = connection
        self._late: deque[tuple[bytes, SendCompletion]] = deque()

    @property
    def is_late(self) -> bool:
        """Whether records are kept that the socket did not take."""
        return bool(self._late)

    def send(self, address: Address, offset: int, start: float) -> SendCompletion:
        """Tell of a message. Raises WorkerError where the other end is gone."""
        return self._send(_RECORD.pack(*address, offset, start), SendCompletion(start))

    def shut_down(self) -> None:
        """Tell that no more messages will come. Raises WorkerError."""
        self._send(_SHUTDOWN, SendCompletion(0.0))

    def receive(self) -> bool:
        """Take the next record, if there is one. False where there is none, or `lost`."""
        if self.lost is not None:
            return False
        try:
            record = self._socket.recv(_RECORD.size)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            return True  # Said once, where the other end closed without reading all.
        except OSError as error:
            self._lose(str(error))
            return False
        self._take(record)
        return True

    def catch_up(self) -> None:
        """Send what is late, as far as the socket takes it."""
        while self._late:
            record, sent = self._late[0]
            try:
                if not self._takes(record):
                    return
                sent.end = time.monotonic()
            except WorkerError as error:
                sent.error = error
            self._late.popleft()

    def close(self) -> None:
        """End the connection: both ends find the other gone. Any thread may do so."""
        with suppress(OSError):  # The other end may have been faster.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _send(self, record: bytes, sent: SendCompletion) -> SendCompletion:
        self.catch_up()
        if self._late or not self._takes(record):
            self._late.append((record, sent))
        else:
            sent.end = time.monotonic()
        return sent

    def _takes(self, record: bytes) -> bool:
        """Whether the socket takes a record. Raises WorkerError where the other end is gone."""
        try:
            self._socket.send(record)
        except BlockingIOError:
            return False
        except OSError as error:
            raise self._lose(str(error)) from None
        return True

    def _take(self, record: bytes) -> None:
        if not record:
            self._lose("its process has ended")
        elif record == _SHUTDOWN:
            self._lose("it has ended its run")
        else:
            tag, call, turn, offset, start = _RECORD.unpack(record)
            self.arrived[Address(tag, call, turn)] = (offset, start)

    def _lose(self, reason: str) -> WorkerError:
        """Note that the other end is gone; the first reason stands."""
        if self.lost is None:
            self.lost = WorkerError(f"rank {self.rank} is gone: {reason}", lost=True)
        return self.lost


LARGE = 256 << 10
"""Bytes of a result from which on a buffer is worth its additional round."""

LendBuffer = Callable[[Sequence[int], TensorSpec], Message]
"""Makes a message of a blank tensor that the sender and the members it goes to may write to."""


def exchange_in_place(
    operation: Operation, member: int, tensor: Tensor | None, buffer: LendBuffer
) -> Exchange:
    """The rounds of one member that shares memory with all others."""
    if tensor is None or operation.kind not in IN_PLACE:
        return exchange(operation, member, tensor)
    if operation.gotten(member).contiguous.nbytes < LARGE:
        return exchange_at_once(operation, member, tensor)
    return IN_PLACE[operation.kind](operation, member, tensor, buffer)


def _all_gather(operation: Operation, member: int, tensor: Tensor, buffer: LendBuffer) -> Exchange:
    """Everyone copies what it gives to its place in the buffer."""
    spec = operation.gotten(member).contiguous
    if member == 0:
        message = buffer(peers_of(operation, member), spec)
        yield Round([message])
        whole = message.tensor
    else:
        received = yield Round(incoming={0: spec})
        whole = received[0]
    assert operation.join is not None
    sizes = [operation.given(i).shape[operation.join] for i in range(operation.size)]
    whole.split(sizes, operation.join)[member].copy_(tensor)
    yield _written(operation, member)
    return whole


def _all_reduce(operation: Operation, member: int, tensor: Tensor, buffer: LendBuffer) -> Exchange:
    """Everyone reduces one part, in the buffer, where what the first one gives is there before."""
    flat = tensor.reshape(-1)
    sizes = even_sizes(flat.numel(), operation.size)
    given = flat.split(sizes)
    peers = peers_of(operation, member)
    incoming = dict.fromkeys(peers, plain(given[member]))
    if member == 0:
        message = buffer(peers, plain(flat))
        whole = message.tensor
        part = whole[: sizes[0]]
        whole[sizes[0] :].copy_(flat[sizes[0] :])
        tensors = dict((yield Round([message], incoming)))
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
    return Round([Message(nothing, plain(nothing), peers)], dict.fromkeys(peers, plain(nothing)))


IN_PLACE: Mapping[str, Callable[[Operation, int, Tensor, LendBuffer], Exchange]] = {
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
}
"""The kinds of communication whose large results members write in place, in two rounds."""
