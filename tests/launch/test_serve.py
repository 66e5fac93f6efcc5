from __future__ import annotations

import threading
import time

import pytest
import torch

from shardwright.engine.slot_engine import Finished
from shardwright.errors import WorkerError
from shardwright.launch.host import Call, Host
from shardwright.launch.inbox import End, Inbox
from shardwright.launch.serve import serve
from tests.engine.test_slot_engine import X, worker_of
from tests.runtime.sketch import chain


def test_calls_are_run_in_turn_until_the_end() -> None:
    worker, hands = worker_of(chain(2), "d0")
    inbox = Inbox()
    for number in range(3):
        inbox.put(Call(number, {"x": X}))
    replies: list[Finished] = []
    serving = threading.Thread(target=serve, args=(Host(worker), inbox, replies.append))
    serving.start()
    while len(replies) < 3:
        time.sleep(0.01)
    inbox.put(End())
    serving.join(5)
    assert not serving.is_alive()
    assert [reply.call for reply in replies] == [0, 1, 2]
    assert len(hands.log) == 3


def test_what_arrives_wakes_the_loop() -> None:
    worker, hands = worker_of(chain(2), "d1", trace=True)
    inbox = Inbox()
    replies: list[Finished] = []
    serving = threading.Thread(target=serve, args=(Host(worker), inbox, replies.append))
    serving.start()
    inbox.put(Call(0, {}))
    while not hands.log:
        time.sleep(0.01)
    hands.started["recv.y0@d1", 0].arrived = torch.ones(3, 4)
    inbox.ring()
    inbox.ring()
    while not replies:
        time.sleep(0.01)
    inbox.put(End())
    serving.join(5)
    assert list(replies[0].outputs) == ["y1"]
    waits = [event for event in replies[0].events if event.kind == "wait"]
    assert waits
    assert {event.task for event in waits} == {"recv.y0@d1"}


def test_a_wait_ends_when_patience_does() -> None:
    worker, _ = worker_of(chain(2), "d1")
    inbox = Inbox()
    inbox.put(Call(7, {}))
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"nothing came for 0\.2 s \(call 7\)") as caught:
        serve(Host(worker), inbox, lambda _: None, patience=0.2)
    assert 0.1 < time.monotonic() - start < 5
    found = caught.value
    assert (found.rank, found.task, found.tensor) == (1, "recv.y0@d1", "y0@d1")


def test_patience_is_for_calls_only() -> None:
    worker, _ = worker_of(chain(2), "d1")
    inbox = Inbox()
    threading.Timer(0.3, inbox.put, [Call(0, {})]).start()
    start = time.monotonic()
    with pytest.raises(WorkerError, match="nothing came"):
        serve(Host(worker), inbox, lambda _: None, patience=0.2)
    assert time.monotonic() - start > 0.45
