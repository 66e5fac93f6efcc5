"""One worker against a transport whose messages the test delivers."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from shardwright.comm import Interval, Membership, PendingTransfer, Transport
from shardwright.engine.call_worker import CallWorker as Worker
from shardwright.engine.slot import make_slot
from shardwright.engine.slot_steps import constants_of
from shardwright.launch.inbox import Inbox
from shardwright.pipeline import Pipeline
from tests.runtime.sketch import Sketch, chain, identity

X = torch.ones(3, 4)


class Hand(PendingTransfer):
    """A communication that the test completes."""

    def __init__(self, gives: bool) -> None:
        self.arrived: Tensor | None = None
        self.left = True
        self.gives = gives

    def ready(self) -> bool:
        return self.gives or self.arrived is not None

    def result(self) -> Tensor | None:
        return self.arrived

    def interval(self) -> Interval | None:
        return Interval(1.0, 2.0) if self.left else None


class Hands(Transport):
    """Notes what is started, as (supertask, call)."""

    def __init__(self) -> None:
        self.started: dict[tuple[str, int], Hand] = {}
        self.log: list[tuple[str, int]] = []

    def start(self, membership: Membership, call: int, tensor: Tensor | None) -> PendingTransfer:
        key = (membership.operation.tasks[membership.member], call)
        self.log.append(key)
        self.started[key] = Hand(membership.operation.outputs[membership.member] is None)
        return self.started[key]

    def close(self) -> None:
        return None

    def abort(self) -> None:
        return None


def worker_of(pipeline: Pipeline, slot: str, *, trace: bool = False) -> tuple[Worker, Hands]:
    hands = Hands()
    constants = pipeline.weights.load(constants_of(pipeline, slot))
    return Worker(make_slot(pipeline, slot, constants), hands, trace=trace), hands


def run_on(worker: Worker) -> int:
    """Advance until there is nothing to do."""
    steps = 0
    while worker.advance():
        steps += 1
    return steps


def finished(worker: Worker) -> list[int]:
    calls = []
    while (done := worker.finished()) is not None:
        calls.append(done.call)
    return calls


def test_the_first_slot_runs_ahead_in_the_order_of_calls() -> None:
    worker, hands = worker_of(chain(2), "d0")
    for call in range(3):
        worker.begin(call, {"x": X})
    run_on(worker)
    assert hands.log == [("send.y0@d1", call) for call in range(3)]
    assert finished(worker) == [0, 1, 2]
    assert not worker.busy


def test_a_call_is_not_over_before_what_it_sends_has_left() -> None:
    worker, hands = worker_of(chain(2), "d0")
    worker.begin(0, {"x": X})
    assert worker.advance()
    assert worker.advance()
    hands.started["send.y0@d1", 0].left = False
    assert not worker.advance()
    assert worker.busy
    assert worker.awaited() == (0, 1)
    hands.started["send.y0@d1", 0].left = True
    assert worker.advance()
    assert finished(worker) == [0]


def test_a_later_call_runs_up_to_its_first_receive_while_an_earlier_one_waits() -> None:
    sketch = Sketch(2)
    sketch.input("x", (2,), "d0")
    sketch.input("mask", (2,), "d1")
    sketch.fx("d0.0", "d0", ["x"], ["y"], identity)
    sketch.fx("d1.0", "d1", ["mask"], ["wide"], identity)
    received = sketch.send("y", "d0", "d1")
    sketch.fx("d1.1", "d1", [received, "wide"], ["z"], product)
    worker, hands = worker_of(sketch.finish(["z"]), "d1", trace=True)
    for call in range(2):
        worker.begin(call, {"mask": torch.full((2,), float(call))})
    assert run_on(worker) == 2
    assert hands.log == [("recv.y@d1", 0)], "the later call stays behind the earlier one"
    hands.started["recv.y@d1", 0].arrived = torch.ones(2)
    run_on(worker)
    hands.started["recv.y@d1", 1].arrived = torch.ones(2)
    run_on(worker)
    events = [worker.finished().events for _ in range(2)]
    tasks = [[(event.call, event.task, event.kind) for event in row] for row in events]
    expected = [("d1.0", "compute"), ("d1.1", "compute"), ("recv.y@d1", "recv")]
    assert [sorted(row) for row in tasks] == [
        [(call, task, kind) for task, kind in expected] for call in range(2)
    ]


def test_what_others_wait_for_goes_first() -> None:
    """d1 prepares something for d0 at the start of a call and has much to do at its end."""
    sketch = Sketch(2)
    sketch.input("x", (2,), "d1")
    sketch.fx("d1.0", "d1", ["x"], ["early"], identity)
    there = sketch.send("early", "d1", "d0")
    sketch.fx("d0.0", "d0", [there], ["y"], identity)
    back = sketch.send("y", "d0", "d1")
    sketch.fx("d1.1", "d1", [back], ["z"], identity)
    sketch.fx("d1.2", "d1", ["z"], ["end"], identity)
    worker, hands = worker_of(sketch.finish(["end"]), "d1")
    worker.begin(0, {"x": torch.ones(2)})
    run_on(worker)
    hands.started["recv.y@d1", 0].arrived = torch.ones(2)
    assert worker.advance()
    worker.begin(1, {"x": torch.ones(2)})
    worker.advance()
    worker.advance()
    assert hands.log[-1] == ("send.early@d0", 1), "before the rest of call 0"
    run_on(worker)
    assert finished(worker) == [0]


def product(builder, a, b):
    return builder.call("aten.mul.Tensor", a, b)


def counting() -> Pipeline:
    """y = x + count, and count becomes count + 1 with each call; y goes to another slot."""
    sketch = Sketch(2)
    sketch.input("x", (1,))
    sketch.constant("count", torch.zeros(1))
    sketch.fx(
        "d0.0",
        "d0",
        ["x", "count"],
        ["y", "more"],
        lambda b, x, c: [b.call("aten.add.Tensor", x, c), b.call("aten.add.Scalar", c, 1)],
    )
    sketch.fx("d1.0", "d1", [sketch.send("y", "d0", "d1")], ["z"], identity)
    return sketch.finish(["z"], replaces={"more": "count"})


def test_state_is_replaced_between_calls() -> None:
    worker, hands = worker_of(counting(), "d0")
    for call in range(3):
        worker.begin(call, {"x": torch.zeros(1)})
    worker.advance()
    worker.advance()
    hands.started["send.y@d1", 0].left = False
    assert not worker.advance(), "the next call needs the state that this one leaves"
    assert worker.slot.constants["count"].item() == 0
    hands.started["send.y@d1", 0].left = True
    run_on(worker)
    assert worker.slot.constants["count"].item() == 3
    assert finished(worker) == [0, 1, 2]


def test_one_call_after_the_other_where_the_transport_wants_it() -> None:
    hands = Hands()
    hands.in_order = True
    pipeline = chain(3)
    constants = pipeline.weights.load(constants_of(pipeline, "d1"))
    worker = Worker(make_slot(pipeline, "d1", constants), hands)
    worker.begin(0, {})
    worker.begin(1, {})
    run_on(worker)
    assert hands.log == [("recv.y0@d1", 0)]


def test_a_failure_comes_out_as_it_is() -> None:
    worker, _ = worker_of(chain(2), "d0")
    worker.begin(0, {"x": torch.ones(3, 5)})
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        worker.advance()
    assert worker.at is not None
    assert worker.at.task == "d0.0"
    worker.reset()
    assert not worker.busy


def test_waiting_is_noted_with_what_is_waited_for() -> None:
    worker, hands = worker_of(chain(2), "d1", trace=True)
    inbox = Inbox()
    assert not worker.wait(inbox.bell, 0.01)
    worker.begin(0, {})
    assert not worker.advance()
    inbox.ring()
    before = time.monotonic()
    assert worker.wait(inbox.bell, 20)
    hands.started["recv.y0@d1", 0].arrived = X
    run_on(worker)
    events = worker.finished().events
    (wait,) = [event for event in events if event.kind == "wait"]
    assert wait.task == "recv.y0@d1"
    assert before <= wait.start <= wait.end <= time.monotonic()
