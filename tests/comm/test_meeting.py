from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Callable

import pytest
import torch.distributed as dist

from shardwright.comm import meeting as meeting_module
from shardwright.comm.arena import Arena
from shardwright.comm.meeting import Meeting, this_host
from shardwright.comm.post import Address
from shardwright.comm.shared import SharedPost
from shardwright.errors import LaunchError
from tests.comm.one_process import descriptors
from tests.comm.test_shared import SPEC, message


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

    def meet(rank: int) -> SharedPost:
        arena = Arena(3)
        meeting = Meeting(store, rank, 3, sharing=True)
        links = meeting.links({0, 1, 2} - {rank}, arena)
        meeting.close()
        assert meeting.hosts == [this_host()] * 3
        return SharedPost(rank, arena, links, 0.0)

    posts = together(3, meet)
    for a, sender in enumerate(posts):
        for b, receiver in enumerate(posts):
            if a != b:
                address = Address(a, b, 0)
                sender.send([b], address, message(10 * a + b))
                assert receiver.has(a, address)
                assert (receiver.take(a, address, SPEC).tensor == 10 * a + b).all()
    for post in posts:
        post.close()
    del posts, post, sender, receiver
    gc.collect()
    assert descriptors() == before


def test_a_rank_may_have_no_part_in_it() -> None:
    store = dist.HashStore()

    def meet(rank: int) -> list[str]:
        meeting = Meeting(store, rank, 3, sharing=rank != 1)
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
        meeting = Meeting(store, rank, 3, sharing=True)
        links = meeting.links([[1], [0, 2], [1]][rank], arena)
        meeting.close()
        arena.close()
        found = sorted(link.rank for link in links)
        for link in links:
            link.close()
        return found

    assert together(3, meet) == [[1], [0, 2], [1]]


def test_other_users_get_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def stranger_first(connection: socket.socket) -> int:
        asked.append(connection)
        return os.geteuid() + (len(asked) == 1)

    monkeypatch.setattr(meeting_module, "_user_of", stranger_first)
    store = dist.HashStore()

    def meet(rank: int) -> object:
        arena = Arena(2)
        meeting = Meeting(store, rank, 2, sharing=True)
        if rank == 1:
            with pytest.raises(LaunchError, match="rank 1 cannot reach the ranks of its own host"):
                meeting.links([0], arena)
        (link,) = meeting.links([1 - rank], arena)
        meeting.close()
        arena.close()
        link.close()
        return link.rank

    assert together(2, meet) == [1, 0]
    assert asked[0].fileno() == -1
