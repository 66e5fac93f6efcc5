"""One worker's steps against a transport whose messages the test delivers."""

from __future__ import annotations

import pytest
import torch

from shardwright.engine.slot_steps import constants_of
from shardwright.engine.step_worker import StepWorker
from shardwright.launch.making import Options, make_worker
from shardwright.pipeline import Microbatches, Pipeline, TensorInfo, Training
from shardwright.pipeline.check_schedule import schedule_info
from shardwright.schedules import make_schedule
from tests.engine.test_call_worker import Hands, finished, run_on
from tests.runtime.linear_step import WIDTH, linear_step
from tests.runtime.sketch import Sketch, identity


def worker_of(
    pipeline: Pipeline, slot: str, *, lookahead: int = 1, in_order: bool = False
) -> tuple[StepWorker, Hands]:
    hands = Hands()
    hands.in_order = in_order
    constants = pipeline.weights.load(constants_of(pipeline, slot))
    options = Options(trace=True, lookahead=lookahead)
    worker = make_worker(pipeline, slot, constants, hands, options)
    assert isinstance(worker, StepWorker)
    return worker, hands


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
    worker, hands = worker_of(reducing(), "d0", lookahead=lookahead)
    worker.begin(5, {"x0": torch.arange(6.0).reshape(3, 2)})
    run_on(worker)
    computed = [event.microbatch for event in worker._events[5]]
    assert computed == list(range(ahead)), "what comes before the all_reduce"
    assert hands.log == [("all_reduce.d0", 5 * 4)], "the next one's stays behind it"
    assert worker.awaited() == (5, 1)
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
    worker, hands = worker_of(pipeline, "d0")
    worker.begin(0, batch_of_one())
    run_on(worker)
    assert hands.log == [("sums.d0", 1), ("reduce0.d0", 1)], "neither waits for the other"
    hands.started["reduce0.d0", 1].arrived = torch.ones(WIDTH, WIDTH).double()
    run_on(worker)
    assert "U0.0" in {event.task for event in worker._events[0]}
    assert worker.entries[worker.awaited()[1]].task == "sums.d0"


def test_actions_go_one_after_another_where_the_transport_wants_it() -> None:
    worker, _ = worker_of(reducing(), "d0", lookahead=9, in_order=True)
    worker.begin(0, {"x0": torch.zeros(3, 2)})
    run_on(worker)
    assert [event.microbatch for event in worker._events[0]] == [0]


def test_memory_that_a_send_still_reads_is_not_overwritten() -> None:
    """The next step's first gradient goes where this one's sum is that the other slot waits for."""
    pipeline = linear_step("gpipe", ranks=1, microbatches=1, data=2)
    worker, hands = worker_of(pipeline, "d0")
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
