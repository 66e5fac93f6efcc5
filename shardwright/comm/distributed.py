"""Ranks in processes of their own.

`connect` makes a rank's transport to all others. It sends each operation the way that its members'
devices and hosts allow: between CUDA devices by NCCL (`nccl`); between CPU slots of one host in
shared memory (`shared_memory`); all others over sockets (`gloo`). The last two can serve one
operation together.

Every rank connects, with the operations of the whole pipeline in the same order,
and all find the same ways. A process group of torch.distributed is made only where one is used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from shardwright.comm.arena import Arena
from shardwright.comm.gloo import GlooEndpoint
from shardwright.comm.nccl import NcclTransport, make_groups
from shardwright.comm.rendezvous import Rendezvous
from shardwright.comm.rounds import Address, Endpoint, Exchange, Message, SendCompletion, exchange
from shardwright.comm.shared_memory import SharedMemoryEndpoint, exchange_in_place
from shardwright.comm.transport import (
    Interval,
    Membership,
    Notify,
    Operation,
    PendingTransfer,
    TensorSpec,
    Transport,
)
from shardwright.comm.wire import conform
from shardwright.errors import RunError

_FOREVER = timedelta(days=365)
"""A resident worker may idle for long; who waits too long for what is for the worker to say."""
_GATHER_TAG = 0
_SPIN = 1e-4
"""Seconds that a rank looks out for messages before it sleeps, where it has a core to itself."""

TRANSPORT_VARIABLE = "SHARDWRIGHT_TRANSPORT"
"""The environment variable that chooses: ``auto``, or ``gloo`` to share no memory."""


def join_group(
    store: Store, rank: int, size: int, device_kinds: Iterable[str]
) -> dist.ProcessGroup:
    """Make this process rank ``rank`` of the default process group; gives the group."""
    backend = "cpu:gloo,cuda:nccl" if "cuda" in device_kinds else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_FOREVER)
    group: dist.ProcessGroup | None = dist.group.WORLD
    assert group is not None, "the default group was just made"
    return group


def adopt_group() -> dist.ProcessGroup:
    """A group of all ranks for host memory, where the program has made the default group itself."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=_FOREVER)
    return group


def gather_bytes(content: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """What every rank of a group gives, in their order. Raises RuntimeError where a rank is gone.

    By sends and receives: a thread of gloo's may hold a collective's tensors for a moment longer
    than the call takes, needs the interpreter to free them, and aborts a process that is ending.
    """
    lengths = _exchange(torch.tensor([len(content)]), [1] * group.size(), group)
    given = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    found = _exchange(given, [int(length) for length in lengths], group)
    return [each.numpy().tobytes() for each in found]


def _exchange(given: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> list[Tensor]:
    """The tensor that each rank gives to all others; ``sizes`` are their lengths."""
    found = [given.new_empty(size) for size in sizes]
    found[group.rank()] = given
    peers = [peer for peer in range(group.size()) if peer != group.rank()]
    works = [group.recv([found[peer]], peer, _GATHER_TAG) for peer in peers]
    works += [group.send([given], peer, _GATHER_TAG) for peer in peers]
    for work in works:
        work.wait()
    return found


def connect(
    store: Store,
    rank: int,
    devices: Sequence[torch.device],
    operations: Sequence[Operation],
    *,
    threads: int,
    notify: Notify,
    make_group: Callable[[], dist.ProcessGroup],
) -> Transport:
    """A rank's access to all others; ``devices`` has one entry a rank.

    Each rank computes with ``threads`` threads. ``make_group`` makes the group of all ranks that
    carries host memory, where one is needed: on all ranks or on none. Raises LaunchError, and
    RunError where there is no memory to share or the environment asks for what there is not.
    """
    rendezvous = Rendezvous(store, rank, len(devices), sharing=_shares_memory())
    try:
        native = [o for o in operations if _is_native(o, devices)]
        pairs = _pairs(o for o in operations if not _is_native(o, devices))
        near = {pair for pair in pairs if _is_near(*pair, devices, rendezvous.hosts)}
        group = make_group() if native or pairs != near else None
        endpoints: dict[int, Endpoint] = {}
        if group is not None:
            endpoints |= _gloo_endpoints(group, rank, pairs - near, notify, devices[rank])
        endpoints |= _shared_memory_endpoints(rendezvous, rank, near, threads)
    finally:
        rendezvous.close()
    messages = MessageTransport(endpoints)
    return DistributedTransport(rank, devices[rank], native, messages) if native else messages


class DistributedTransport(Transport):
    """A rank's access to all others where some operations are the device library's.

    Every rank makes one, with the same ``native`` operations in the same order.
    """

    def __init__(
        self,
        rank: int,
        device: torch.device,
        native: Sequence[Operation],
        messages: MessageTransport,
    ) -> None:
        self._native_tags = {operation.tag for operation in native}
        self._native = NcclTransport(make_groups(native, "nccl"), device)
        self._messages = messages
        self.in_order = any(rank in operation.ranks for operation in native)

    def start(self, membership: Membership, call: int, tensor: Tensor | None) -> PendingTransfer:
        """Start an operation on the library that its members share, or by messages."""
        native = membership.operation.tag in self._native_tags
        transport: Transport = self._native if native else self._messages
        return transport.start(membership, call, tensor)

    def wait(self, wakeup: int, timeout: float | None) -> bool:
        """Wait for messages; the device waits for the library by itself."""
        return self._messages.wait(wakeup, timeout)

    def close(self) -> None:
        """Let go of both."""
        self._native.close()
        self._messages.close()

    def abort(self) -> None:
        """Cut both off."""
        self._native.abort()
        self._messages.abort()


def _shares_memory() -> bool:
    choice = os.environ.get(TRANSPORT_VARIABLE, "auto")
    if choice not in ("auto", "gloo"):
        raise RunError(f"{TRANSPORT_VARIABLE} is {choice!r}; it may be auto or gloo")
    return choice == "auto"


def _is_native(operation: Operation, devices: Sequence[torch.device]) -> bool:
    return all(devices[rank].type == "cuda" for rank in operation.ranks)


def _pairs(operations: Iterable[Operation]) -> set[tuple[int, int]]:
    """Who may send a message to whom."""
    return {
        (source, other)
        for operation in operations
        for source, given in zip(operation.ranks, operation.inputs, strict=True)
        if given is not None
        for other in operation.ranks
        if other != source
    }


def _is_near(a: int, b: int, devices: Sequence[torch.device], hosts: Sequence[str]) -> bool:
    """Whether two ranks can share memory."""
    return devices[a].type == devices[b].type == "cpu" and hosts[a] == hosts[b] != ""


def _gloo_endpoints(
    group: dist.ProcessGroup,
    rank: int,
    pairs: Collection[tuple[int, int]],
    notify: Notify,
    device: torch.device,
) -> dict[int, Endpoint]:
    sources = {source for source, other in pairs if other == rank}
    destinations = {other for source, other in pairs if source == rank}
    endpoint = GlooEndpoint(group, sources, destinations, notify, device)
    return dict.fromkeys(sources | destinations, endpoint)


def _shared_memory_endpoints(
    rendezvous: Rendezvous, rank: int, pairs: Collection[tuple[int, int]], threads: int
) -> dict[int, Endpoint]:
    peers = {other for pair in pairs if rank in pair for other in pair} - {rank}
    if not peers:
        return {}
    arena = Arena(len(rendezvous.hosts))
    busy = rendezvous.hosts.count(rendezvous.hosts[rank]) * threads
    spin = _SPIN if busy <= len(os.sched_getaffinity(0)) else 0.0
    try:
        links = rendezvous.links(peers, arena)
    except BaseException:
        arena.close()
        raise
    return dict.fromkeys(peers, SharedMemoryEndpoint(rank, arena, links, spin))


class MessageTransport(Transport):
    """A rank's access to others: ``endpoints`` has the endpoint that reaches each of them."""

    def __init__(self, endpoints: Mapping[int, Endpoint]) -> None:
        self._endpoints = endpoints
        self._distinct = list(dict.fromkeys(endpoints.values()))
        self._shared = next(
            (p for p in self._distinct if isinstance(p, SharedMemoryEndpoint)), None
        )

    def start(self, membership: Membership, call: int, tensor: Tensor | None) -> PendingTransfer:
        """Endpoint the messages of the first round."""
        rounds = self._rounds(membership.operation, membership.member, tensor)
        return _MessageTransfer(self._endpoints, rounds, membership, call)

    def wait(self, wakeup: int, timeout: float | None) -> bool:
        """Sleep; the shared one wakes by itself, others write to the descriptor."""
        if self._shared is None:
            return super().wait(wakeup, timeout)
        return self._shared.wait(wakeup, timeout)

    def close(self) -> None:
        """Shut down towards the other ranks."""
        for endpoint in self._distinct:
            endpoint.close()

    def abort(self) -> None:
        """Cut the connections of all ranks to this one."""
        for endpoint in self._distinct:
            endpoint.abort()

    def _rounds(self, operation: Operation, member: int, tensor: Tensor | None) -> Exchange:
        shared = self._shared
        if shared is None or not shared.ranks.issuperset(operation.ranks):
            return exchange(operation, member, tensor)

        def buffer(to: Sequence[int], spec: TensorSpec) -> Message:
            return shared.buffer([operation.ranks[peer] for peer in to], to, spec)

        return exchange_in_place(operation, member, tensor, buffer)


class _MessageTransfer(PendingTransfer):
    """A member on its way through the rounds of an exchange."""

    def __init__(
        self, endpoints: Mapping[int, Endpoint], rounds: Exchange, membership: Membership, call: int
    ) -> None:
        self._endpoints = endpoints
        self._rounds = rounds
        self._operation = membership.operation
        self._member = membership.member
        self._call = call
        self._turn = -1
        self._sent: list[SendCompletion] = []
        self._travelled: list[tuple[float, float]] = []
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
        times = list(self._travelled)
        for sent in self._sent:
            if sent.error is not None:
                raise sent.error
            if sent.end is None:
                return None
            times.append((sent.start, sent.end))
        return Interval(min(start for start, _ in times), max(end for _, end in times))

    def _step(self, received: dict[int, Tensor] | None) -> None:
        """Hand a round's tensors over and post the next round's messages."""
        try:
            # A generator takes None first.
            turn = self._rounds.send(received)  # type: ignore[arg-type]
        except StopIteration as stop:
            self._finished, self._result = True, stop.value
            return
        self._turn += 1
        self._address = Address(self._operation.tag, self._call, self._turn)
        self._incoming = turn.incoming
        for message in turn.outgoing:
            for endpoint, ranks in self._routes(message).items():
                self._sent += endpoint.send(ranks, self._address, message)

    def _routes(self, message: Message) -> dict[Endpoint, list[int]]:
        """The ranks that a message goes to, by the endpoint that reaches them."""
        routes: dict[Endpoint, list[int]] = {}
        for peer in message.to:
            rank = self._operation.ranks[peer]
            routes.setdefault(self._endpoints[rank], []).append(rank)
        return routes

    def _round_is_complete(self) -> bool:
        for peer in self._incoming:
            rank = self._operation.ranks[peer]
            if not self._endpoints[rank].has(rank, self._address):
                return False
        return True

    def _take(self) -> dict[int, Tensor]:
        tensors = {}
        for peer, spec in self._incoming.items():
            rank = self._operation.ranks[peer]
            arrived = self._endpoints[rank].take(rank, self._address, spec)
            self._travelled.append((arrived.start, arrived.end))
            tensors[peer] = arrived.tensor
        return tensors
