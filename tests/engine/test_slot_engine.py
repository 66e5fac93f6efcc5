"""One slot against a transport whose messages the test delivers."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from shardwright.comm import Interval, Membership, PendingTransfer, Transport
from shardwright.compiler.tasks import compile_slot
from shardwright.engine.program import constants_of
from shardwright.engine.slot import torch_device
from shardwright.engine.slot_engine import SlotEngine
from shardwright.errors import DeviceError
from shardwright.launch.protocol import Mailbox
from shardwright.pipeline import Device, Microbatches, Pipeline, TensorInfo, Training
from shardwright.pipeline.check_schedule import schedule_info
from shardwright.schedules import make_schedule
from tests.runtime.linear_step import WIDTH, linear_step
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
        self.leaves = True

    def start(self, membership: Membership, call: int, tensor: Tensor | None) -> PendingTransfer:
        key = (membership.operation.tasks[membership.member], call)
        self.log.append(key)
        self.started[key] = Hand(membership.operation.outputs[membership.member] is None)
        self.started[key].left = self.leaves
        return self.started[key]

    def close(self) -> None:
        return None

    def abort(self) -> None:
        return None


def worker_of(
    pipeline: Pipeline,
    slot: str,
    *,
    trace: bool = False,
    lookahead: int = 1,
    in_order: bool = False,
) -> tuple[SlotEngine, Hands]:
    hands = Hands()
    hands.in_order = in_order
    constants = pipeline.weights.load(constants_of(pipeline, slot))
    compiled = compile_slot(pipeline, slot, constants, lookahead=lookahead)
    return SlotEngine(compiled, hands, trace=trace), hands


def run_on(worker: SlotEngine) -> int:
    """Advance until there is nothing to do."""
    steps = 0
    while worker.advance():
        steps += 1
    return steps


def finished(worker: SlotEngine) -> list[int]:
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
    hands.leaves = False
    worker.begin(0, {"x": X})
    assert run_on(worker) == 2
    assert worker.busy
    assert worker.awaited()[:2] == (0, 1)
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
    assert run_on(worker) == 3
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
    hands.leaves = False
    assert run_on(worker) == 2, "the next call needs the state that this one leaves"
    assert worker.slot.constants["count"].item() == 0
    hands.started["send.y@d1", 0].left = hands.leaves = True
    run_on(worker)
    assert worker.slot.constants["count"].item() == 3
    assert finished(worker) == [0, 1, 2]


def test_one_call_after_the_other_where_the_transport_wants_it() -> None:
    worker, hands = worker_of(chain(3), "d1", in_order=True)
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
    mailbox = Mailbox()
    assert not worker.wait(mailbox.wakeup, 0.01)
    worker.begin(0, {})
    run_on(worker)
    mailbox.notify()
    before = time.monotonic()
    assert worker.wait(mailbox.wakeup, 20)
    hands.started["recv.y0@d1", 0].arrived = X
    run_on(worker)
    events = worker.finished().events
    (wait,) = [event for event in events if event.kind == "wait"]
    assert wait.task == "recv.y0@d1"
    assert before <= wait.start <= wait.end <= time.monotonic()


# --- training steps -------------------------------------------------------------------------------


def reducing(microbatches: int = 3) -> Pipeline:
    """Two slots of one stage: each microbatch is doubled, summed over the slots, and added up."""
    sketch = Sketch(2)
    for k in range(2):
        sketch.input(f"x{k}", (2,), f"d{k}", part=("x", ((2 * k, 2 * k + 2),)))
        sketch.fx(
            f"double.{k}", f"d{k}", [f"x{k}"], [f"twice{k}"],
            lambda b, x: b.call("aten.mul.Tensor", x, 2.0),
        )  # fmt: skip
    inputs = {f"d{k}": f"twice{k}" for k in range(2)}
    outputs = {f"d{k}": (f"sum{k}", (2,)) for k in range(2)}
    sketch.together("all_reduce", inputs, outputs, reduce_op="sum")
    for k in range(2):
        sketch.tensors[f"acc{k}"] = TensorInfo((2,), "f32", init="zeros")
        sketch.fx(
            f"add.{k}", f"d{k}", [f"acc{k}", f"sum{k}"], [f"new{k}"],
            lambda b, acc, s: b.call("aten.add.Tensor", acc, s),
        )  # fmt: skip
    sketch.fx("end", "d0", ["new0"], ["y"], identity)
    pipeline = sketch.finish(["y"])
    schedule = make_schedule("gpipe", ranks=1, microbatches=microbatches)
    pipeline.training = Training(
        {"new0": "acc0", "new1": "acc1"},
        Microbatches(microbatches, {"x": 0}),
        schedule_info(schedule, [["d0", "d1"]]),
    )
    pipeline.metadata.tensors.inputs["x"].shape = (4 * microbatches,)
    for name, task in pipeline.supertasks.items():
        if task.device is not None:
            task.phase, task.stage = ("update", None) if name == "end" else ("forward", 0)
    return pipeline


def batch_of_one() -> dict[str, torch.Tensor]:
    """Inputs of ``d0`` in `linear_step` with two slots and one microbatch."""
    return {
        "x.0": torch.ones(1, 4, WIDTH).double(),
        "target.0": torch.zeros(1, 4, WIDTH).double(),
        "lr.0.0": torch.tensor(0.1).double(),
    }


@pytest.mark.parametrize(("lookahead", "ahead"), [(0, 1), (1, 2), (2, 3), (9, 3)])
def test_later_microbatches_run_while_one_waits(lookahead: int, ahead: int) -> None:
    worker, hands = worker_of(reducing(), "d0", trace=True, lookahead=lookahead)
    worker.begin(5, {"x0": torch.arange(6.0).reshape(3, 2)})
    run_on(worker)
    computed = [event.microbatch for event in worker._events[5]]
    assert computed == list(range(ahead)), "what comes before the all_reduce"
    assert hands.log == [("all_reduce.d0", 5 * 4)], "the next one's stays behind it"
    assert worker.awaited()[:2] == (5, 1)
    for microbatch in range(3):
        hands.started["all_reduce.d0", 5 * 4 + microbatch].arrived = torch.ones(2)
        run_on(worker)
    done = worker.finished()
    assert done is not None
    assert done.outputs["y"].tolist() == [3, 3]
    assert not worker.busy


def test_gradients_are_summed_while_others_are_made() -> None:
    """Each as soon as it is there, before the loss that stands before it in the file."""
    pipeline = linear_step("gpipe", ranks=1, microbatches=1, data=2)
    tasks = dict(pipeline.supertasks)
    first = {name: tasks.pop(name) for name in ("reduce0.d0", "reduce0.d1")}
    ends = {name: tasks.pop(name) for name in ("sums.d0", "sums.d1", "U0.0", "U0.1")}
    others = {name: tasks.pop(name) for name in ("total", "output")}
    pipeline.supertasks = tasks | {k: v for k, v in ends.items() if k[0] == "s"} | first
    pipeline.supertasks |= {k: v for k, v in ends.items() if k[0] == "U"} | others
    worker, hands = worker_of(pipeline, "d0", trace=True)
    worker.begin(0, batch_of_one())
    run_on(worker)
    assert hands.log == [("sums.d0", 1), ("reduce0.d0", 1)], "neither waits for the other"
    hands.started["reduce0.d0", 1].arrived = torch.ones(WIDTH, WIDTH).double()
    run_on(worker)
    assert "U0.0" in {event.task for event in worker._events[0]}
    assert worker.program.entries[worker.awaited().entry].task == "sums.d0"


def test_actions_go_one_after_another_where_the_transport_wants_it() -> None:
    worker, _ = worker_of(reducing(), "d0", trace=True, lookahead=9, in_order=True)
    worker.begin(0, {"x0": torch.zeros(3, 2)})
    run_on(worker)
    assert [event.microbatch for event in worker._events[0]] == [0]


def test_memory_that_a_send_still_reads_is_not_overwritten() -> None:
    """The next step's first gradient goes where this one's sum is that the other slot waits for."""
    pipeline = linear_step("gpipe", ranks=1, microbatches=1, data=2)
    worker, hands = worker_of(pipeline, "d0", trace=True)
    for step in range(2):
        worker.begin(step, batch_of_one())
    run_on(worker)
    reduced = hands.started["reduce0.d0", 1]
    reduced.left = False
    reduced.arrived = torch.ones(WIDTH, WIDTH).double()
    run_on(worker)
    total = hands.started["sums.d0", 1]
    total.arrived = torch.tensor(1.0).double()
    run_on(worker)
    assert "W0.0" not in {event.task for event in worker._events[1]}
    assert {"F0.0", "loss.0"} <= {event.task for event in worker._events[1]}
    assert finished(worker) == []
    reduced.left = True
    run_on(worker)
    assert "W0.0" in {event.task for event in worker._events[1]}
    assert finished(worker) == [0]


def test_what_has_left_is_let_go_of() -> None:
    worker, hands = worker_of(linear_step("gpipe", microbatches=4), "d0")
    worker.begin(0, {"x.0": torch.ones(4, 2, WIDTH).double(), "lr.0.0": torch.tensor(0.1).double()})
    run_on(worker)
    sent = [hand for (task, _), hand in hands.started.items() if task == "send.h1.0@d1"]
    assert len(sent) == 4
    assert {id(posted.pending) for posted in worker._posted}.isdisjoint(map(id, sent))


def test_where_it_was_when_a_step_fails() -> None:
    worker, _ = worker_of(linear_step(microbatches=2), "d0")
    bad = torch.ones(2, 4, WIDTH + 1).double()
    worker.begin(0, {"x.0": bad, "lr.0.0": torch.tensor(0.1).double()})
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        worker.advance()
    assert worker.at is not None
    assert (worker.at.task, worker.at.stage, worker.at.microbatch) == ("F0.0", 0, 0)
    worker.reset()
    assert not worker.busy


def test_devices() -> None:
    assert torch_device("d0", Device("cpu", 3)) == torch.device("cpu")
    with pytest.raises(DeviceError, match=r"'d0' is of kind 'npu'.*change the slot's kind to cpu"):
        torch_device("d0", Device("npu", 0))
    with pytest.raises(DeviceError, match=r"'d0' is cuda 99, but this machine has \d+ CUDA"):
        torch_device("d0", Device("cuda", 99))
