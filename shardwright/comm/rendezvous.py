"""How the ranks of one host find each other: all listen and say where, then each calls those below.

From a store that all ranks share come `PeerLink`s to ranks of this host, over which both ends have
handed the descriptor of their memory to the other. Ranks are of one host where local sockets reach
from one to the other: same machine, network namespace and user. Sockets have names that only
the kernel knows and that vanish with them. So no file is made, and nothing is left however a rank
ends.

Invariant: nobody gets a descriptor but a process of this user, which the kernel says at
both ends, that knows what the other end has put in the store for the ranks alone. Whoever else
calls, and says something else, nothing or half of it, is hung up on, and nobody waits for him.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import select
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Collection
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

import msgspec
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from shardwright.comm.arena import Arena, Window
from shardwright.comm.shared_memory import PeerLink
from shardwright.errors import LaunchError

_PATIENCE = 120.0
"""Seconds between saying where one listens and having linked all others."""
_SECRET_BYTES = 16
_HELLO = struct.Struct(f"=q{_SECRET_BYTES}s")
"""Who speaks, and the secret of who is spoken to."""
_CREDENTIALS = struct.Struct("=iII")
_KEY = "local socket of rank {}"


class _RankAddress(msgspec.Struct, frozen=True):
    """What a rank tells the others: its host, the name of its socket, what callers must know."""

    host: str
    name: str
    secret: bytes


class Rendezvous:
    """One rank where all find each other. ``hosts`` says of every rank where it is.

    Equal names stand for one host; the name is empty where a rank does not share memory: without
    ``sharing``, or on a system that has not what it takes. Raises LaunchError.
    """

    def __init__(self, store: Store, rank: int, size: int, *, sharing: bool) -> None:
        self._rank = rank
        self._listener: socket.socket | None = None
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        host, name = this_host() if sharing else "", ""
        if host:
            name = secrets.token_hex(16)
            self._listener = _local_socket()
            self._listener.bind(_address(name))
            self._listener.listen(size)
        place = _RankAddress(host, name, self._secret)
        store.set(_KEY.format(rank), msgspec.json.encode(place).decode())
        try:
            self._addresses = [_read_address(store, other) for other in range(size)]
        except BaseException:
            self.close()
            raise
        self.hosts = [place.host for place in self._addresses]

    def links(self, peers: Collection[int], arena: Arena) -> list[PeerLink]:
        """Links to ``peers``, all of this rank's host; they must ask for one to this rank.

        Raises LaunchError.
        """
        below = sorted(peer for peer in peers if peer < self._rank)
        above = {peer for peer in peers if peer > self._rank}
        with ExitStack() as opened:
            try:
                called = {peer: self._call(peer, opened) for peer in below}
                callers = self._answer(above, opened)
                for peer, connection in callers.items():
                    self._introduce(connection, peer, arena)
                links = []
                for peer, connection in called.items():
                    links.append(self._link(connection, peer))
                    self._introduce(connection, peer, arena)
                links += [self._link(connection, peer) for peer, connection in callers.items()]
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

    def _call(self, peer: int, opened: ExitStack) -> socket.socket:
        """Connect to a rank, which need not have answered yet, and say who calls."""
        connection = opened.enter_context(_local_socket())
        connection.connect(_address(self._addresses[peer].name))
        if not _is_own(connection):
            raise PermissionError(f"a process of another user listens in place of rank {peer}")
        connection.send(self._hello_to(peer))
        return connection

    def _answer(self, callers: Collection[int], opened: ExitStack) -> dict[int, socket.socket]:
        """Take the calls of these ranks, and hang up on everybody else."""
        if not callers:
            return {}
        listener = self._listener
        assert listener is not None, "a rank that is called listens"
        deadline = time.monotonic() + _PATIENCE
        found: dict[int, socket.socket] = {}
        silent: dict[int, socket.socket] = {}
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        while missing := sorted({*callers} - {*found}):
            events = poll.poll(1e3 * max(0.0, deadline - time.monotonic()))
            if not events or time.monotonic() > deadline:
                raise TimeoutError(f"ranks {missing} have not called for {_PATIENCE:g} s")
            for descriptor, _ in events:
                if descriptor == listener.fileno():
                    caller = opened.enter_context(listener.accept()[0])
                    if not _is_own(caller):
                        caller.close()
                        continue
                    silent[caller.fileno()] = caller
                    poll.register(caller, select.POLLIN)
                else:
                    caller = silent.pop(descriptor)
                    poll.unregister(caller)
                    peer = self._caller(caller)
                    if peer not in missing or peer in found:
                        caller.close()
                        continue
                    found[peer] = caller
        for caller in silent.values():
            caller.close()
        return found

    def _caller(self, connection: socket.socket) -> int | None:
        """Who says to be at the other end, and knows what a rank knows."""
        connection.settimeout(_PATIENCE)
        try:
            hello = connection.recv(_HELLO.size + 1)
        except OSError:
            return None
        if len(hello) != _HELLO.size:
            return None
        rank, secret = _HELLO.unpack(hello)
        return int(rank) if secrets.compare_digest(secret, self._secret) else None

    def _hello_to(self, peer: int) -> bytes:
        return _HELLO.pack(self._rank, self._addresses[peer].secret)

    def _introduce(self, connection: socket.socket, peer: int, arena: Arena) -> None:
        """Give this rank's memory to a rank that has shown who it is."""
        socket.send_fds(connection, [self._hello_to(peer)], [arena.descriptor])

    def _link(self, connection: socket.socket, peer: int) -> PeerLink:
        """The link to a rank, when it has introduced itself."""
        hello, descriptors, _, _ = socket.recv_fds(connection, _HELLO.size + 1, 1)
        try:
            if not hello:
                raise ConnectionError(f"rank {peer} has ended")
            expected = _HELLO.pack(peer, self._secret)
            if not secrets.compare_digest(hello, expected) or not descriptors:
                raise ConnectionError(f"who answers in place of rank {peer} is not that rank")
            window = Window(descriptors[0])
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return PeerLink(peer, connection, window)


def _read_address(store: Store, rank: int) -> _RankAddress:
    """What a rank has told. Raises LaunchError."""
    try:
        place = msgspec.json.decode(store.get(_KEY.format(rank)), type=_RankAddress)
    except (RuntimeError, msgspec.MsgspecError) as error:
        raise LaunchError(
            f"the store by which the ranks meet does not say where rank {rank} is: {error}"
        ) from None
    if len(place.secret) != _SECRET_BYTES or "\0" in place.name:
        raise LaunchError(
            f"what the store by which the ranks meet says of rank {rank} was not written by it; is "
            "its port open to others?"
        )
    return place


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


def _is_own(connection: socket.socket) -> bool:
    """Whether the process at the other end is this user's: who calls, or who listens."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(found)
    return int(user) == os.geteuid()


_PATH_BYTES = 1024
"""The longest path that macOS gives (MAXPATHLEN)."""


def make_store() -> IO[bytes]:
    """The file of a new store; the store is gone when the last process has closed it."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("shardwright-store"), "r+b")
    return tempfile.NamedTemporaryFile()


def open_store(descriptor: int) -> Store:
    """The store in a file of `make_store`, which stays open as long as the store is used."""
    store: Store = dist.FileStore(_path_of(descriptor))  # type: ignore[attr-defined]
    return store


def _path_of(descriptor: int) -> str:
    """A path by which this process opens a file once more: locks are held by opened files."""
    if sys.platform == "darwin":
        found = fcntl.fcntl(descriptor, fcntl.F_GETPATH, bytes(_PATH_BYTES))
        return os.fsdecode(found.rstrip(b"\0"))
    return f"/proc/self/fd/{descriptor}"
