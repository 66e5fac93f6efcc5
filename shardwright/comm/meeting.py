"""How the ranks of one host find each other: all listen and say where, then each calls those below.

In comes a store that all ranks share; out come `Link`s to ranks of this host, over which both ends
have handed the descriptor of their memory to the other. Ranks are of one host where local sockets
reach from one to the other: same machine, network namespace and user. Sockets have names that only
the kernel knows and that vanish with them. So no file is made, and nothing is left however a rank
ends.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
from collections.abc import Collection
from contextlib import ExitStack, suppress
from pathlib import Path

from torch._C._distributed_c10d import Store

from shardwright.comm.arena import Arena, Window
from shardwright.comm.link import Link
from shardwright.errors import LaunchError

_PATIENCE = 120.0
"""Seconds between saying where one listens and having called all others."""
_HELLO = struct.Struct("=q")
_CREDENTIALS = struct.Struct("=iII")
_KEY = "local socket of rank {}"


class Meeting:
    """One rank at the meeting of all. ``hosts`` says of every rank where it is.

    Equal names stand for one host; the name is empty where a rank does not share memory: without
    ``sharing``, or on a system that has not what it takes.
    """

    def __init__(self, store: Store, rank: int, size: int, *, sharing: bool) -> None:
        self._rank = rank
        self._listener: socket.socket | None = None
        host, name = this_host() if sharing else "", ""
        if host:
            name = secrets.token_hex(16)
            self._listener = _local_socket()
            self._listener.bind(_address(name))
            self._listener.listen(size)
        store.set(_KEY.format(rank), f"{name}/{host}")
        places = [store.get(_KEY.format(other)).decode() for other in range(size)]
        self._names = [place.partition("/")[0] for place in places]
        self.hosts = [place.partition("/")[2] for place in places]

    def links(self, peers: Collection[int], arena: Arena) -> list[Link]:
        """Links to ``peers``, all of this rank's host; they must ask for one to this rank.

        Raises LaunchError.
        """
        with ExitStack() as opened:
            try:
                below = [self._call(peer, arena, opened) for peer in peers if peer < self._rank]
                above = [self._answer(arena, opened) for peer in peers if peer > self._rank]
                links = [_link(connection) for connection in (*above, *below)]
            except OSError as error:
                raise LaunchError(
                    f"rank {self._rank} cannot reach the ranks of its own host over local sockets "
                    f"({error}); set SHARDWRIGHT_TRANSPORT=gloo to do without"
                ) from None
            opened.pop_all()
            return links

    def close(self) -> None:
        """Stop listening."""
        if self._listener is not None:
            self._listener.close()

    def _call(self, peer: int, arena: Arena, opened: ExitStack) -> socket.socket:
        """Connect to a rank, which need not have answered yet."""
        connection = opened.enter_context(_local_socket())
        connection.connect(_address(self._names[peer]))
        _introduce(connection, self._rank, arena)
        return connection

    def _answer(self, arena: Arena, opened: ExitStack) -> socket.socket:
        """Take the next call of a process of this user."""
        assert self._listener is not None, "a rank that is called listens"
        while True:
            connection = opened.enter_context(self._listener.accept()[0])
            if _user_of(connection) == os.geteuid():
                connection.settimeout(_PATIENCE)
                _introduce(connection, self._rank, arena)
                return connection
            connection.close()


def this_host() -> str:
    """A name for all processes that this one can share memory with; empty where there is none."""
    if not hasattr(os, "memfd_create"):
        return ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/net')}/{os.geteuid()}"
    return ""


def _local_socket() -> socket.socket:
    found = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    found.settimeout(_PATIENCE)
    return found


def _address(name: str) -> bytes:
    """A name that the kernel keeps, without a file."""
    return f"\0shardwright-{name}".encode()


def _introduce(connection: socket.socket, rank: int, arena: Arena) -> None:
    socket.send_fds(connection, [_HELLO.pack(rank)], [arena.descriptor])


def _link(connection: socket.socket) -> Link:
    """The link to whoever introduces itself at the other end."""
    hello, descriptors, _, _ = socket.recv_fds(connection, _HELLO.size, 1)
    if not descriptors:
        raise ConnectionError("the other rank has ended")
    try:
        window = Window(descriptors[0])
    finally:
        os.close(descriptors[0])
    (rank,) = _HELLO.unpack(hello)
    return Link(rank, connection, window)


def _user_of(connection: socket.socket) -> int:
    """The user whose process is at the other end."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(found)
    return int(user)
