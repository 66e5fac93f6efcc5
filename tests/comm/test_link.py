from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from shardwright.comm.arena import Arena, Window
from shardwright.comm.rounds import Address
from shardwright.comm.shared_memory import NOWHERE, PeerLink
from shardwright.errors import WorkerError


@pytest.fixture
def ends() -> Iterator[tuple[PeerLink, PeerLink]]:
    """Ranks 0 and 1."""
    arena = Arena(2)
    window = Window(arena.descriptor)
    arena.close()
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    links = PeerLink(1, pair[0], window), PeerLink(0, pair[1], window)
    yield links
    for link in links:
        link.close()


def test_a_record_says_where_a_message_is(ends: tuple[PeerLink, PeerLink]) -> None:
    here, there = ends
    sent = here.send(Address(3, 1 << 40, 2), 64, 1.5)
    assert (sent.start, sent.error) == (1.5, None)
    assert sent.end is not None
    assert there.receive()
    assert there.arrived == {Address(3, 1 << 40, 2): (64, 1.5)}
    assert not there.receive()
    assert there.lost is None


def test_late_records_keep_their_order(ends: tuple[PeerLink, PeerLink]) -> None:
    here, there = ends
    sent = []
    while not here.is_late:
        sent.append(here.send(Address(0, len(sent), 0), NOWHERE, 0.0))
    sent += [here.send(Address(0, len(sent) + more, 0), NOWHERE, 0.0) for more in range(50)]
    assert [one.end is None for one in sent] == [False] * (len(sent) - 51) + [True] * 51
    while there.receive():
        here.catch_up()
    assert [address.call for address in there.arrived] == list(range(len(sent)))
    assert not here.is_late
    assert all(one.end is not None for one in sent)


def test_a_goodbye_comes_last_and_says_why(ends: tuple[PeerLink, PeerLink]) -> None:
    here, there = ends
    there.send(Address(9, 9, 9), NOWHERE, 0.0)
    here.send(Address(0, 0, 0), NOWHERE, 0.0)
    here.shut_down()
    here.close()
    while there.receive():
        continue
    assert list(there.arrived) == [Address(0, 0, 0)], "although the other end left some unread"
    assert str(there.lost) == "rank 0 is gone: it has ended its run"


def test_an_end_without_goodbye(ends: tuple[PeerLink, PeerLink]) -> None:
    here, there = ends
    here.close()
    assert there.receive()
    assert not there.receive()
    assert str(there.lost) == "rank 0 is gone: its process has ended"
    with pytest.raises(WorkerError, match="rank 0 is gone: its process has ended"):
        there.send(Address(0, 0, 0), NOWHERE, 0.0)


def test_what_is_late_when_the_other_end_goes(ends: tuple[PeerLink, PeerLink]) -> None:
    here, there = ends
    while not here.is_late:
        sent = here.send(Address(0, 0, 0), NOWHERE, 0.0)
    there.close()
    here.catch_up()
    assert not here.is_late
    assert sent.end is None
    assert isinstance(sent.error, WorkerError)
