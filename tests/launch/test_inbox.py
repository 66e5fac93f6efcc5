from __future__ import annotations

import select
import threading

from shardwright.launch.host import Call
from shardwright.launch.inbox import End, Inbox


def rings(inbox: Inbox, timeout: float = 0) -> bool:
    return bool(select.select([inbox.bell], [], [], timeout)[0])


def test_items_come_in_order_and_ring() -> None:
    inbox = Inbox()
    assert inbox.take() is None
    assert not rings(inbox)
    inbox.put(Call(1, {}))
    inbox.put(End())
    assert rings(inbox)
    inbox.quiet()
    assert not rings(inbox)
    assert inbox.take() == Call(1, {})
    assert inbox.take() == End()
    assert inbox.take() is None


def test_ringing_never_blocks() -> None:
    inbox = Inbox()
    for _ in range(100_000):
        inbox.ring()
    while rings(inbox):
        inbox.quiet()
    inbox.ring()
    assert rings(inbox)


def test_another_thread_wakes_who_waits() -> None:
    inbox = Inbox()
    threading.Timer(0.1, inbox.put, [End()]).start()
    assert rings(inbox, 20)
    assert inbox.take() == End()


def test_a_ring_in_the_middle_of_quieting_is_not_left_for_ever() -> None:
    """As threads see it that run at once: the note of a ring and the ring itself are two."""
    inbox = Inbox()
    inbox.ring()
    inbox.quiet()
    inbox._rope.send(b"\0")
    assert rings(inbox)
    inbox.quiet()
    assert not rings(inbox)
