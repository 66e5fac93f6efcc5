"""Messages over point-to-point operations of torch.distributed (gloo).

A message is a header of four integers (the group's tag, call, round, number of bytes) and, unless
empty, one flat buffer of bytes under that tag. Sends are posted at once
and waited for by one sleeping thread a destination. One thread a source always has a receive
posted for the next header, then posts one for its bytes: so what arrives is taken at once,
whatever this rank is computing, and no thread polls (waiting releases the GIL and sleeps).

gloo's own collectives lack i16, f8, uneven pieces and an order of additions that one can count on;
pairs of ranks have all of it and need no process group for each set of members. Tensors on an
accelerator pass through host memory here; `nccl` keeps them on the device.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.comm.rounds import Address, Endpoint, Message, RecvCompletion, SendCompletion
from shardwright.comm.transport import Notify, TensorSpec
from shardwright.comm.wire import conform, pack, unpack
from shardwright.errors import WorkerError

_HEADER_TAG = 0
_NEVER_TAG = 2**31 - 1
_SHUTDOWN = -1
_JOIN_SECONDS = 5.0

_Posted = tuple[SendCompletion, list[dist.Work], list[Tensor]]


class GlooEndpoint(Endpoint):
    """Messages over a process group: sends to ``destinations``, keeps what ``sources`` send.

    Tensors are taken from and brought to ``device``.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        sources: Collection[int],
        destinations: Collection[int],
        notify: Notify,
        device: torch.device | None = None,
    ) -> None:
        self._group = group
        self._notify = notify
        self._device = device or torch.device("cpu")
        self._peers = {*sources, *destinations}
        self._lock = threading.Lock()
        self._arrived: dict[tuple[int, Address], RecvCompletion] = {}
        self._lost: dict[int, WorkerError] = {}
        self._outboxes = {rank: _Outbox(group, rank, notify) for rank in destinations}
        self._receivers = [
            threading.Thread(target=self._receive, args=(rank,), name=f"from {rank}", daemon=True)
            for rank in sources
        ]
        for thread in self._receivers:
            thread.start()

    def send(
        self, ranks: Sequence[int], address: Address, message: Message
    ) -> list[SendCompletion]:
        """Endpoint a message to each; its tensor must not change until it has left."""
        content = _host_bytes(message)
        return [self._outboxes[rank].send(address, content) for rank in ranks]

    def has(self, rank: int, address: Address) -> bool:
        """Whether a message is there. Raises WorkerError where it cannot come any more."""
        with self._lock:
            if (rank, address) in self._arrived:
                return True
            if rank in self._lost:
                raise self._lost[rank]
            return False

    def take(self, rank: int, address: Address, spec: TensorSpec) -> RecvCompletion:
        """A message that is there; the endpoint forgets it."""
        with self._lock:
            arrived = self._arrived.pop((rank, address))
        content = arrived.tensor.to(self._device, non_blocking=True)
        return arrived._replace(tensor=unpack(content, spec))

    def close(self) -> None:
        """Tell every destination that no more comes and wait until all sources have.

        Who says nothing for long is cut off: no thread may stay in gloo when the process ends.
        """
        for outbox in self._outboxes.values():
            outbox.close()
        if not self._join():
            self.abort()

    def abort(self) -> None:
        """Cut the connections to all ranks: threads that wait for them end, here and there.

        gloo has no call for that, but closes every connection when a receive times out.
        """
        nothing = torch.empty(1, dtype=torch.uint8)
        for peer in [*self._peers][:1]:
            with suppress(RuntimeError):
                never = self._group.recv([nothing], peer, _NEVER_TAG)
                never.wait(timedelta(milliseconds=1))
        for outbox in self._outboxes.values():
            outbox.end()
        self._join()

    def _join(self) -> bool:
        """Wait for the threads that receive; False where one has not ended in time."""
        deadline = time.monotonic() + _JOIN_SECONDS
        for thread in self._receivers:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._receivers)

    def _receive(self, source: int) -> None:
        """Take one message after another until the source shuts down or is gone."""
        reason = "it has ended its run"
        try:
            while self._receive_one(source):
                self._notify()
        except RuntimeError as error:
            reason = _first_line(error)
        with self._lock:
            self._lost[source] = WorkerError(f"rank {source} is gone: {reason}", lost=True)
        self._notify()

    def _receive_one(self, source: int) -> bool:
        """Take one message; False when it was its shutdown."""
        header = torch.empty(4, dtype=torch.int64)
        self._group.recv([header], source, _HEADER_TAG).wait()
        tag, call, turn, size = header.tolist()
        if tag == _SHUTDOWN:
            return False
        start = time.monotonic()
        content = torch.empty(size, dtype=torch.uint8)
        if size:
            self._group.recv([content], source, tag + 1).wait()
        address = Address(tag, call, turn)
        with self._lock:
            self._arrived[source, address] = RecvCompletion(content, start, time.monotonic())
        return True


class _Outbox:
    """What goes to one destination."""

    def __init__(self, group: dist.ProcessGroup, destination: int, notify: Notify) -> None:
        self._group = group
        self._destination = destination
        self._notify = notify
        self._posted: SimpleQueue[_Posted | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._wait, name=f"to {destination}", daemon=True)
        self._thread.start()

    def send(self, address: Address, content: Tensor) -> SendCompletion:
        sent = SendCompletion(time.monotonic())
        header = torch.tensor([*address, content.numel()], dtype=torch.int64)
        try:
            works = [self._group.send([header], self._destination, _HEADER_TAG)]
            if content.numel():
                works.append(self._group.send([content], self._destination, address.tag + 1))
        except RuntimeError as error:
            raise self._gone(error) from None
        self._posted.put((sent, works, [header, content]))
        return sent

    def close(self) -> None:
        with suppress(WorkerError):  # Who is gone need not be told.
            self.send(Address(_SHUTDOWN, 0, 0), torch.empty(0, dtype=torch.uint8))
        self.end()

    def end(self) -> None:
        """Let the thread end when it has waited for everything that was posted."""
        self._posted.put(None)
        self._thread.join(_JOIN_SECONDS)

    def _wait(self) -> None:
        """Note when messages have left, in turn; their memory is held until then."""
        while (posted := self._posted.get()) is not None:
            sent, works, _ = posted
            try:
                for work in works:
                    work.wait()
                sent.end = time.monotonic()
            except RuntimeError as error:
                sent.error = self._gone(error)
            del posted, works, _
            self._notify()

    def _gone(self, error: RuntimeError) -> WorkerError:
        return WorkerError(f"rank {self._destination} is gone: {_first_line(error)}", lost=True)


def _host_bytes(message: Message) -> Tensor:
    """A message's bytes in host memory, pinned where they come from a CUDA device."""
    content = pack(conform(message.tensor, message.spec), message.spec)
    if content.device.type == "cpu":
        return content
    pinned = torch.empty_like(content, device="cpu", pin_memory=content.is_cuda)
    return pinned.copy_(content)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
