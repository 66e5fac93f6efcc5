"""Ranks in processes of their own.

`connect` makes a rank's transport to all others. It sends each operation the way that its members'
devices and hosts allow: between CUDA devices by NCCL (`native`); between CPU slots of one host in
shared memory (`shared`); all others over sockets (`gloo`). The last two can serve one operation
together.

What always holds: every rank connects, with the operations of the whole pipeline in the same order,
and all find the same ways. A process group of torch.distributed is made only where one is used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from shardwright.comm.arena import Arena
from shardwright.comm.gloo import GlooPost
from shardwright.comm.meeting import Meeting
from shardwright.comm.messages import MessageTransport
from shardwright.comm.native import NativeTransport, make_groups
from shardwright.comm.operation import Membership, Operation
from shardwright.comm.post import Post
from shardwright.comm.shared import SharedPost
from shardwright.comm.transport import Notify, Pending, Transport
from shardwright.errors import RunError

_FOREVER = timedelta(days=365)
"""A resident worker may idle for long; who waits too long for what is for the worker to say."""
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
    """What every rank of a group gives, in their order.

    Raises RuntimeError where a rank is gone.
    """
    size = torch.tensor([len(content)])
    sizes = [torch.empty_like(size) for _ in range(group.size())]
    dist.all_gather(sizes, size, group=group)
    given = torch.zeros(int(max(sizes)), dtype=torch.uint8)
    given[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    found = [torch.empty_like(given) for _ in sizes]
    dist.all_gather(found, given, group=group)
    return [each[: int(size)].numpy().tobytes() for each, size in zip(found, sizes, strict=True)]


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
    meeting = Meeting(store, rank, len(devices), sharing=_shares_memory())
    try:
        native = [o for o in operations if _is_native(o, devices)]
        pairs = _pairs(o for o in operations if not _is_native(o, devices))
        near = {pair for pair in pairs if _is_near(*pair, devices, meeting.hosts)}
        group = make_group() if native or pairs != near else None
        posts: dict[int, Post] = {}
        if group is not None:
            posts |= _gloo_posts(group, rank, pairs - near, notify, devices[rank])
        posts |= _shared_posts(meeting, rank, near, threads)
    finally:
        meeting.close()
    messages = MessageTransport(posts)
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
        self._native = NativeTransport(make_groups(native, "nccl"), device)
        self._messages = messages
        self.in_order = any(rank in operation.ranks for operation in native)

    def start(self, membership: Membership, call: int, tensor: Tensor | None) -> Pending:
        """Start an operation on the library that its members share, or by messages."""
        native = membership.operation.tag in self._native_tags
        transport: Transport = self._native if native else self._messages
        return transport.start(membership, call, tensor)

    def wait(self, bell: int, timeout: float | None) -> bool:
        """Wait for messages; the device waits for the library by itself."""
        return self._messages.wait(bell, timeout)

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


def _gloo_posts(
    group: dist.ProcessGroup,
    rank: int,
    pairs: Collection[tuple[int, int]],
    notify: Notify,
    device: torch.device,
) -> dict[int, Post]:
    sources = {source for source, other in pairs if other == rank}
    destinations = {other for source, other in pairs if source == rank}
    post = GlooPost(group, sources, destinations, notify, device)
    return dict.fromkeys(sources | destinations, post)


def _shared_posts(
    meeting: Meeting, rank: int, pairs: Collection[tuple[int, int]], threads: int
) -> dict[int, Post]:
    peers = {other for pair in pairs if rank in pair for other in pair} - {rank}
    if not peers:
        return {}
    arena = Arena(len(meeting.hosts))
    busy = meeting.hosts.count(meeting.hosts[rank]) * threads
    spin = _SPIN if busy <= len(os.sched_getaffinity(0)) else 0.0
    try:
        links = meeting.links(peers, arena)
    except BaseException:
        arena.close()
        raise
    return dict.fromkeys(peers, SharedPost(rank, arena, links, spin))
