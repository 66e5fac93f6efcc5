from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import msgspec
import pytest
import torch.distributed as dist

from shardwright.comm.arena import Arena
from shardwright.comm.rendezvous import _HELLO, _KEY, Rendezvous, _address, _RankAddress, this_host
from shardwright.comm.rounds import Address
from shardwright.comm.shared_memory import SharedMemoryEndpoint
from shardwright.errors import LaunchError
from tests.comm.one_process import descriptors
from tests.comm.test_shared_memory import SPEC, message


def together(count: int, rank_does: Callable[[int], object]) -> list:
    """What each rank's thread gives."""
    results: list = [None] * count

    def run(rank: int) -> None:
        try:
            results[rank] = rank_does(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def test_every_pair_is_linked_and_sees_the_other_s_memory() -> None:
    gc.collect()
    before = descriptors()
    store = dist.HashStore()

    def meet(rank: int) -> SharedMemoryEndpoint:
        arena = Arena(3)
        meeting = Rendezvous(store, rank, 3, sharing=True)
        links = meeting.links({0, 1, 2} - {rank}, arena)
        meeting.close()
        assert meeting.hosts == [this_host()] * 3
        return SharedMemoryEndpoint(rank, arena, links, 0.0)

    endpoints = together(3, meet)
    for a, sender in enumerate(endpoints):
        for b, receiver in enumerate(endpoints):
            if a != b:
                address = Address(a, b, 0)
                sender.send([b], address, message(10 * a + b))
                assert receiver.has(a, address)
                assert (receiver.take(a, address, SPEC).tensor == 10 * a + b).all()
    for post in endpoints:
        post.close()
    del endpoints, post, sender, receiver
    gc.collect()
    assert descriptors() == before


def test_a_rank_may_have_no_part_in_it() -> None:
    store = dist.HashStore()

    def meet(rank: int) -> list[str]:
        meeting = Rendezvous(store, rank, 3, sharing=rank != 1)
        meeting.close()
        return meeting.hosts

    hosts = together(3, meet)
    assert hosts == [[this_host(), "", this_host()]] * 3


def test_a_system_without_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    assert this_host() == ""


def test_only_linked_pairs_have_sockets() -> None:
    """A chain: each rank knows its neighbours only."""
    store = dist.HashStore()

    def meet(rank: int) -> list[int]:
        arena = Arena(3)
        meeting = Rendezvous(store, rank, 3, sharing=True)
        links = meeting.links([[1], [0, 2], [1]][rank], arena)
        meeting.close()
        arena.close()
        found = sorted(link.rank for link in links)
        for link in links:
            link.close()
        return found

    assert together(3, meet) == [[1], [0, 2], [1]]


# --- who is no rank ---------------------------------------------------------------------------


def call_first(says: bytes | None) -> tuple[list, list]:
    """What two ranks meet as, and what a stranger hears who calls rank 0 before rank 1 does."""
    store = dist.HashStore()
    heard: list = []
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stranger.settimeout(30)

    def meet(rank: int) -> object:
        arena = Arena(2)
        meeting = Rendezvous(store, rank, 2, sharing=True)
        if rank == 1:
            stranger.connect(_address(meeting._addresses[0].name))
            if says is not None:
                stranger.send(says)
        (link,) = meeting.links([1 - rank], arena)
        meeting.close()
        arena.close()
        link.close()
        return link.rank

    met = together(2, meet)
    with stranger:
        try:
            heard += socket.recv_fds(stranger, 100, 4)[:2]
        except ConnectionResetError:
            heard += [b"", []]
    return met, heard


@pytest.mark.parametrize(
    "says",
    [
        None,
        b"half",
        _HELLO.pack(1, bytes(16)),
        _HELLO.pack(1, bytes(16)) + b"more",
        os.urandom(9000),
    ],
    ids=["nothing", "half a greeting", "no secret", "too much", "garbage"],
)
def test_a_stranger_gets_nothing_and_holds_nobody_up(says: bytes | None) -> None:
    before = descriptors()
    start = time.monotonic()
    met, heard = call_first(says)
    assert met == [1, 0]
    assert heard == [b"", []]
    assert time.monotonic() - start < 20
    gc.collect()
    assert descriptors() == before


CALLER = """
import os, socket, sys
os.setgid(65534); os.setuid(65534)
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as caller:
    caller.connect(b"\\0" + sys.argv[1].encode())
    print("connected", flush=True)
    try:
        caller.send(bytes.fromhex(sys.argv[2]))
        print(*socket.recv_fds(caller, 100, 4)[:2], flush=True)
    except OSError:
        print(b"", [], flush=True)
"""

LISTENER = """
import os, socket, sys
os.setgid(65534); os.setuid(65534)
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
    listener.bind(b"\\0" + sys.argv[1].encode())
    listener.listen()
    print("listens", flush=True)
    caller = listener.accept()[0]
    print(*socket.recv_fds(caller, 100, 4)[:2], flush=True)
"""

as_another_user = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")


@as_another_user
def test_a_caller_of_another_user_is_hung_up_on_though_it_knows_the_secret() -> None:
    store = dist.HashStore()
    said: list[str] = []

    def meet(rank: int) -> object:
        arena = Arena(2)
        meeting = Rendezvous(store, rank, 2, sharing=True)
        if rank == 1:
            name = _address(meeting._addresses[0].name).decode().removeprefix("\0")
            hello = meeting._hello_to(0).hex()
            command = [sys.executable, "-c", CALLER, name, hello]
            caller = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert caller.stdout is not None
            said.append(caller.stdout.readline())
        (link,) = meeting.links([1 - rank], arena)
        if rank == 1:
            said.append(caller.stdout.read())
            caller.communicate()
        meeting.close()
        arena.close()
        link.close()
        return link.rank

    assert together(2, meet) == [1, 0]
    assert said == ["connected\n", "b'' []\n"]


@as_another_user
def test_nothing_is_said_to_a_listener_of_another_user() -> None:
    """The store under torchrun is open to others: they may put another name there."""
    store = dist.HashStore()
    name = f"shardwright-{os.getpid()}"
    command = [sys.executable, "-c", LISTENER, name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as listener:
        assert listener.stdout is not None
        try:
            assert listener.stdout.readline() == "listens\n"
            place = _RankAddress(this_host(), name.removeprefix("shardwright-"), bytes(16))
            store.set(_KEY.format(0), msgspec.json.encode(place).decode())
            arena = Arena(2)
            meeting = Rendezvous(store, 1, 2, sharing=True)
            with pytest.raises(LaunchError, match="another user listens in place of rank 0"):
                meeting.links([0], arena)
            meeting.close()
            arena.close()
            assert listener.stdout.readline() == "b'' []\n"
        finally:
            listener.kill()


@pytest.mark.parametrize(
    "text",
    ["", "garbage", '{"host": "", "name": "", "secret": ""}', '{"host": 1}', "\x80\x04K\x01."],
)
def test_what_no_rank_has_written_in_the_store_is_one_clear_error(text: str) -> None:
    store = dist.HashStore()
    store.set(_KEY.format(1), text)
    before = descriptors()
    with pytest.raises(LaunchError, match="rank 1"):
        Rendezvous(store, 0, 2, sharing=True)
    gc.collect()
    assert descriptors() == before


def test_a_name_where_nobody_listens_is_one_clear_error() -> None:
    store = dist.HashStore()
    place = _RankAddress(this_host(), "nobody", bytes(16))
    store.set(_KEY.format(0), msgspec.json.encode(place).decode())
    arena = Arena(2)
    meeting = Rendezvous(store, 1, 2, sharing=True)
    with pytest.raises(LaunchError, match="rank 1 cannot reach the ranks of its own host"):
        meeting.links([0], arena)
    meeting.close()
    arena.close()
