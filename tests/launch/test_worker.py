"""What is asked of a slot is done in order, by whichever program does it."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright.engine.program import constants_of
from shardwright.engine.slot import LoadedSlot
from shardwright.errors import WorkerError
from shardwright.launch.operators import OperatorSources
from shardwright.launch.protocol import (
    CallFunction,
    Completed,
    EngineOptions,
    LoadProgram,
    Mailbox,
    RunStep,
    Stop,
)
from shardwright.launch.worker import SlotLinks, SlotWorker, serve
from tests.engine.test_slot_engine import Hands, X
from tests.runtime.sketch import chain

READ = "shardwright.runtime.contents:read"


def load_message(number: int, program: int, *, shared: Mapping[str, str], trace: bool = False):
    options = EngineOptions(trace=trace)
    return LoadProgram(
        number, program, chain(2), None, None, dict(shared), OperatorSources(), options
    )


def slot_worker(slot: str, *, trace: bool = False) -> tuple[SlotWorker, list[Hands]]:
    """A slot of a chain of two, and what it sends and receives: of each program that is loaded."""
    pipeline, made = chain(2), []

    def connect(document: object) -> SlotLinks:
        made.append(Hands())
        return SlotLinks(made[-1])

    first = load_message(0, 0, shared={}, trace=trace)
    constants = pipeline.weights.load(constants_of(pipeline, slot))
    return SlotWorker(slot, first, constants, connect), made


def two_programs() -> tuple[SlotWorker, Hands, Hands]:
    """A slot whose calls wait for a tensor, with a second program loaded that does too."""
    worker, made = slot_worker("d1")
    worker.take((load_message(0, 1, shared={"w1": "w1"}), {}))
    assert completed(worker) == [0]
    return worker, *made


def outcomes(worker: SlotWorker) -> list[tuple[Completed, Mapping[str, Tensor]]]:
    """Everything that is done without waiting."""
    found = []
    while worker.advance():
        while (outcome := worker.outcome()) is not None:
            found.append(outcome)
    return found


def completed(worker: SlotWorker) -> list[int]:
    return [done.number for done, _ in outcomes(worker)]


def test_another_programs_call_waits_for_what_came_before() -> None:
    worker, hands, other = two_programs()
    for number, program in ((1, 0), (2, 1), (3, 0)):
        worker.take((RunStep(number, program), {}))
    assert completed(worker) == []
    assert worker.busy
    assert other.log == []
    hands.started["recv.y0@d1", 1].arrived = X
    assert completed(worker) == [1]
    assert other.log == [("recv.y0@d1", 2)]
    assert ("recv.y0@d1", 3) not in hands.log
    other.started["recv.y0@d1", 2].arrived = X
    assert completed(worker) == [2]
    hands.started["recv.y0@d1", 3].arrived = X
    assert completed(worker) == [3]
    assert not worker.busy


def test_calls_of_one_program_do_not_wait_for_each_other() -> None:
    worker, (hands,) = slot_worker("d0")
    for number in range(3):
        worker.take((RunStep(number), {"x": X}))
    assert completed(worker) == [0, 1, 2]
    assert len(hands.log) == 3


def test_a_function_waits_too_and_fails_alone() -> None:
    worker, hands, _ = two_programs()
    worker.take((RunStep(1), {}))
    worker.take((CallFunction(2, READ, {"d1": ["w1"]}), {}))
    worker.take((CallFunction(3, READ, {"d1": ["no such constant"]}), {}))
    worker.take((CallFunction(4, f"{__name__}:anything"), {}))
    assert outcomes(worker) == []
    hands.started["recv.y0@d1", 1].arrived = X
    _, (read, tensors), (second, _), (third, _) = outcomes(worker)
    constant = worker.slot.constants["w1"]
    assert read == Completed(2)
    assert torch.equal(tensors["w1"], constant)
    assert tensors["w1"].data_ptr() != constant.data_ptr()
    assert second.error.error == "KeyError"
    assert "functions of shardwright.* only" in third.error.message


def test_a_function_may_return_plain_data(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwright.runtime import contents

    def count(slot: LoadedSlot, arguments: Any, tensors: Mapping[str, Tensor]) -> int:
        return len(slot.constants) + arguments

    monkeypatch.setattr(contents, "count", count, raising=False)
    worker, *_ = two_programs()
    worker.take((CallFunction(5, "shardwright.runtime.contents:count", 10), {}))
    assert outcomes(worker) == [(Completed(5, 11), {})]


def test_reset() -> None:
    worker, _, _ = two_programs()
    worker.take((RunStep(1), {}))
    worker.take((RunStep(2, 1), {}))
    worker.advance()
    worker.reset()
    assert not worker.busy


# --- the loop of a worker with a thread of its own ------------------------------------------------


def until(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_arrives_wakes_the_loop_until_it_stops() -> None:
    worker, (hands,) = slot_worker("d1", trace=True)
    mailbox, replies = Mailbox(), []
    serving = threading.Thread(
        target=serve, args=(worker, mailbox, lambda *outcome: replies.append(outcome))
    )
    serving.start()
    mailbox.put(RunStep(0))
    until(lambda: hands.log)
    hands.started["recv.y0@d1", 0].arrived = torch.ones(3, 4)
    mailbox.notify()
    until(lambda: replies)
    mailbox.put(Stop())
    serving.join(5)
    assert not serving.is_alive()
    ((done, outputs),) = replies
    assert list(outputs) == ["y1"]
    assert {event.task for event in done.events if event.kind == "wait"} == {"recv.y0@d1"}


def test_a_wait_ends_when_the_timeout_does_but_only_in_a_call() -> None:
    worker, _ = slot_worker("d1")
    mailbox = Mailbox()
    threading.Timer(0.3, mailbox.put, [RunStep(7)]).start()
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"nothing came for 0\.2 s \(call 7\)") as caught:
        serve(worker, mailbox, lambda *_: None, timeout=0.2)
    assert 0.45 < time.monotonic() - start < 5
    found = caught.value
    assert (found.rank, found.task, found.tensor) == (1, "recv.y0@d1", "y0@d1")
