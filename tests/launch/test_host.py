"""What is asked of a slot is done in order, by whichever worker does it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardwright.engine.slot import LoadedSlot
from shardwright.engine.slot_engine import Finished, SlotEngine
from shardwright.launch.host import Answer, Call, Host, Load, Reply, Request
from tests.engine.test_slot_engine import Hands, X, worker_of
from tests.runtime.sketch import chain

READ = "shardwright.runtime.contents:read"


def outcomes(host: Host) -> list[tuple[str, int]]:
    """Everything that comes to an end without waiting: its kind and number."""
    found = []
    while host.advance():
        while (outcome := host.outcome()) is not None:
            number = outcome.call if isinstance(outcome, Finished) else outcome.number
            found.append((type(outcome).__name__, number))
    return found


def waiting_host() -> tuple[Host, Hands, Hands]:
    """A slot whose calls wait for a tensor, with a second pipeline loaded that does too."""
    worker, hands = worker_of(chain(2), "d1")
    host = Host(worker)
    other: list[Hands] = []

    def make(slot: LoadedSlot) -> SlotEngine:
        second, its_hands = worker_of(chain(2), "d1")
        assert slot is worker.slot
        other.append(its_hands)
        return second

    host.take(Load(0, 1, make))
    assert outcomes(host) == [("Answer", 0)]
    return host, hands, other[0]


def test_another_pipelines_call_waits_for_what_came_before() -> None:
    host, hands, other = waiting_host()
    host.take(Call(1, {}))
    host.take(Call(2, {}, 1))
    host.take(Call(3, {}))
    assert outcomes(host) == []
    assert host.busy
    assert other.log == []
    hands.started["recv.y0@d1", 1].arrived = X
    assert outcomes(host) == [("Finished", 1)]
    assert other.log == [("recv.y0@d1", 2)]
    assert ("recv.y0@d1", 3) not in hands.log
    other.started["recv.y0@d1", 2].arrived = X
    assert outcomes(host) == [("Finished", 2)]
    hands.started["recv.y0@d1", 3].arrived = X
    assert outcomes(host) == [("Finished", 3)]
    assert not host.busy


def test_calls_of_one_pipeline_do_not_wait_for_each_other() -> None:
    worker, hands = worker_of(chain(2), "d0")
    host = Host(worker)
    for number in range(3):
        host.take(Call(number, {"x": X}))
    assert outcomes(host) == [("Finished", 0), ("Finished", 1), ("Finished", 2)]
    assert len(hands.log) == 3


def test_a_request_waits_too_and_fails_alone() -> None:
    host, hands, _ = waiting_host()
    host.take(Call(1, {}))
    host.take(Request(2, READ, {"d1": ["w1"]}))
    host.take(Request(3, READ, {"d1": ["no such constant"]}))
    host.take(Request(4, f"{__name__}:anything"))
    assert outcomes(host) == []
    hands.started["recv.y0@d1", 1].arrived = X
    answers: list[Any] = []
    while host.advance():
        while (outcome := host.outcome()) is not None:
            answers.append(outcome)
    first, second, third = answers[1:]
    assert isinstance(first, Answer)
    assert torch.equal(first.reply.tensors["w1"], host.slot.constants["w1"])
    assert first.reply.tensors["w1"].data_ptr() != host.slot.constants["w1"].data_ptr()
    assert isinstance(second.error, KeyError)
    assert "functions of shardwright.* only" in str(third.error)


def test_a_function_may_return_plain_data(monkeypatch: Any) -> None:
    from shardwright.runtime import contents

    def count(slot: LoadedSlot, arguments: Any, tensors: Mapping[str, Tensor]) -> int:
        return len(slot.constants) + arguments

    monkeypatch.setattr(contents, "count", count, raising=False)
    host, *_ = waiting_host()
    host.take(Request(5, "shardwright.runtime.contents:count", 10))
    assert host.advance()
    assert host.outcome() == Answer(5, Reply(11))


def test_reset() -> None:
    host, _, _ = waiting_host()
    host.take(Call(1, {}))
    host.take(Call(2, {}, 1))
    host.advance()
    host.reset()
    assert not host.busy
