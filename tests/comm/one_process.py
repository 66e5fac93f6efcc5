"""Ranks that share memory, all in this process and driven by one thread."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations

from torch import Tensor

from shardwright.comm import Membership, Operation, PendingTransfer
from shardwright.comm.arena import Arena, Window
from shardwright.comm.distributed import MessageTransport
from shardwright.comm.shared_memory import PeerLink, SharedMemoryEndpoint


@contextmanager
def shared_posts(count: int, *, spin: float = 0.0) -> Iterator[list[SharedMemoryEndpoint]]:
    """An endpoint a rank, each linked to all others; cut in the end."""
    arenas = [Arena(count) for _ in range(count)]
    links: list[list[PeerLink]] = [[] for _ in range(count)]
    for a, b in combinations(range(count), 2):
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        links[a].append(PeerLink(b, ends[0], Window(arenas[b].descriptor)))
        links[b].append(PeerLink(a, ends[1], Window(arenas[a].descriptor)))
    endpoints = [
        SharedMemoryEndpoint(rank, arenas[rank], links[rank], spin) for rank in range(count)
    ]
    try:
        yield endpoints
    finally:
        for post in endpoints:
            post.abort()


def transports(endpoints: Sequence[SharedMemoryEndpoint]) -> list[MessageTransport]:
    """The transports of ranks that have nothing but these endpoints."""
    return [
        MessageTransport(dict.fromkeys(post.ranks - {rank}, post))
        for rank, post in enumerate(endpoints)
    ]


def start_all(
    ranks: Sequence[MessageTransport],
    operation: Operation,
    call: int,
    given: Sequence[Tensor | None],
) -> list[PendingTransfer]:
    """Every member's part."""
    return [
        ranks[rank].start(Membership(operation, member), call, given[member])
        for member, rank in enumerate(operation.ranks)
    ]


def finish(pending: Sequence[PendingTransfer]) -> list[Tensor | None]:
    """What the members get, once none has to wait any more."""
    waiting = list(pending)
    for _ in range(100):
        waiting = [part for part in waiting if not part.ready()]
        if not waiting:
            return [part.result() for part in pending]
    raise AssertionError("the members wait for each other")


def descriptors() -> int:
    """How many this process has open."""
    return len(os.listdir("/proc/self/fd"))
