"""Steps of a training pipeline, held against the same steps on one device."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.errors import (
    DeviceError,
    InputError,
    PipelineError,
    RunError,
    WeightError,
    WorkerError,
)
from shardwright.launch.worker import Reply
from shardwright.pipeline import Pipeline, check
from shardwright.runtime.runner import Runner
from shardwright.runtime.training_runner import TrainingRunner
from shardwright.schedules import KINDS
from tests.runtime import operators  # noqa: F401
from tests.runtime.linear_step import ROWS, WIDTH, LinearModel, batches, linear_step
from tests.runtime.sketch import Sketch, chain

LR = 0.01


def model_of(pipeline: Pipeline) -> LinearModel:
    assert pipeline.training is not None
    assert pipeline.training.schedule is not None
    return LinearModel(len(pipeline.training.schedule.placement))


def assert_close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def assert_trains(pipeline: Pipeline, steps: int = 3, **options: Any) -> None:
    """Losses, outputs and state after some steps are those of one device."""
    model = model_of(pipeline)
    with TrainingRunner(pipeline, **options) as session:
        for x, target in batches(steps):
            assert_close(session.step(x, target, lr=LR), model.step(x, target, LR))
        assert_close(session.state(), model.state())


@pytest.mark.parametrize("microbatches", [1, 2, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_every_schedule(kind: str, microbatches: int) -> None:
    pipeline = linear_step(kind, microbatches=microbatches)
    check(pipeline)
    assert_trains(pipeline, in_process=True)


def test_a_step_for_npu_slots_of_several_hosts_runs_in_process_where_asked() -> None:
    pipeline = linear_step("1f1b", microbatches=2)
    for k, device in enumerate(pipeline.devices.values()):
        device.host, device.kind = f"h{k}", "npu"
    with pytest.raises(DeviceError, match="npu_as_cpu=True"):
        TrainingRunner(pipeline, in_process=True)
    assert_trains(pipeline, in_process=True, npu_as_cpu=True)


@pytest.mark.parametrize("lookahead", [0, 1, 3, 100])
@pytest.mark.parametrize("kind", ["gpipe", "zb-h1"])
def test_how_far_ahead_changes_nothing(kind: str, lookahead: int) -> None:
    pipeline = linear_step(kind, ranks=4, microbatches=4)
    assert_trains(pipeline, in_process=True, lookahead=lookahead)


@pytest.mark.parametrize(("ranks", "ahead"), [(1, 2), (2, 1)])
def test_how_far_ahead_a_worker_goes(ranks: int, ahead: int) -> None:
    with TrainingRunner(linear_step(ranks=ranks, data=2), in_process=True) as session:
        for worker in session._backend._workers.values():  # type: ignore[attr-defined]
            assert worker._active.program.lookahead == ahead


@pytest.mark.parametrize(("ranks", "data"), [(1, 2), (2, 2), (1, 4)])
def test_several_slots_share_a_batch(ranks: int, data: int) -> None:
    assert_trains(linear_step(ranks=ranks, data=data), in_process=True)


def test_steps_that_are_submitted_run_one_after_another() -> None:
    pipeline = linear_step()
    model = model_of(pipeline)
    with TrainingRunner(pipeline, in_process=True) as session:
        given = batches(5)
        futures = [session.submit(x, target, lr=LR) for x, target in given]
        assert_close(
            [future.result()["loss"] for future in reversed(futures)][::-1],
            [model.step(x, target, LR)["loss"] for x, target in given],
        )


# --- memory ----------------------------------------------------------------------------------


class Makes(TorchDispatchMode):
    """The matrices that operators make, views apart."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.shape == (WIDTH, WIDTH) and not func.is_view:
            self.made.append(str(func))
        return result


def constants(session: TrainingRunner) -> dict[str, Tensor]:
    return {
        name: tensor
        for worker in session._backend._workers.values()  # type: ignore[attr-defined]
        for name, tensor in worker.slot.constants.items()
    }


def test_state_stays_where_it_is_in_memory() -> None:
    """Accumulators take their first microbatch without a pass to set them to zero."""
    with TrainingRunner(linear_step(microbatches=4), in_process=True) as session:
        before = {name: tensor.data_ptr() for name, tensor in constants(session).items()}
        (x, target), *_ = batches(1)
        session.step(x, target, lr=LR)
        with Makes() as makes:
            session.step(x, target, lr=LR)
        assert {name: t.data_ptr() for name, t in constants(session).items()} == before
    in_place = [name for name in makes.made if "_." in name]
    assert in_place.count("aten.addmm_.default") == 2 * 4
    assert in_place.count("aten.mul_.Tensor") == 2, "the momentum"
    assert in_place.count("aten.sub_.Tensor") == 2, "the parameters"
    assert "aten.zero_.default" not in in_place
    assert [name for name in makes.made if "_." not in name] == ["aten.mul.Tensor"] * 2, "lr m"


def test_a_result_is_the_callers() -> None:
    """It shares no memory with the state, which later steps change."""
    with TrainingRunner(linear_step(), in_process=True) as session:
        (x, target), (x2, target2) = batches(2)
        loss, y = session.step(x, target, lr=LR).values()
        kept = (loss.clone(), y.clone())
        state = session.state()
        kept_state = copy.deepcopy(state)
        session.step(x2, target2, lr=LR)
        assert torch.equal(loss, kept[0])
        assert torch.equal(y, kept[1])
        assert_close(state, kept_state)


# --- arguments -------------------------------------------------------------------------------


def test_a_batch_of_another_size() -> None:
    with TrainingRunner(linear_step(microbatches=4), in_process=True) as session:
        (x, target), *_ = batches(1)
        with pytest.raises(
            InputError,
            match=r"input 'x' is torch.float64\[5, 3\], but a step takes torch.float64\[8, 3\], 4 "
            r"microbatches of 2 along dimension 0; .*train makes a program for each shape",
        ):
            session.step(x[:5], target, lr=LR)
        with pytest.raises(InputError, match=r"'x' is torch.float32\[8, 3\]"):
            session.step(x.float(), target, lr=LR)
        with pytest.raises(InputError, match="'lr' must be given"):
            session.step(x, target)


def test_a_pipeline_of_a_model_has_no_steps() -> None:
    with pytest.raises(RunError, match="not of a training step; use Runner"):
        TrainingRunner(chain(2), in_process=True)
    with pytest.raises(RunError, match="not of a model; use `shardwright train`"):
        Runner(linear_step(), in_process=True)


@pytest.mark.parametrize("wrong", [{"lookahead": -1}, {"in_flight": 0}])
def test_counts_that_cannot_be(wrong: dict[str, int]) -> None:
    with pytest.raises(RunError, match="from 0, steps under way from 1"):
        TrainingRunner(linear_step(), in_process=True, **wrong)


def test_after_a_step_that_failed_a_state_is_needed() -> None:
    pipeline = linear_step(op="runtime_tests.refuse_nan.default")
    (x, target), *_ = batches(1)
    with TrainingRunner(pipeline, in_process=True) as session:
        before = session.state()
        with pytest.raises(WorkerError, match="ArithmeticError: there is a NaN") as caught:
            session.step(x * torch.nan, target, lr=LR)
        error = caught.value
        assert (error.rank, error.task, error.microbatch) == (1, "F1.0", 0)
        with pytest.raises(RunError, match=r"left the state halfway: .*a NaN.*load a state"):
            session.step(x, target, lr=LR)
        session.load_state(before)
        assert_close(session.step(x, target, lr=LR), LinearModel(2).step(x, target, LR))


def test_closed() -> None:
    session = TrainingRunner(linear_step(), in_process=True)
    session.close()
    with pytest.raises(RunError, match="the runner is closed"):
        session.step(*batches(1)[0], lr=LR)


# --- state -----------------------------------------------------------------------------------


def test_state_is_given_and_taken_by_name() -> None:
    pipeline = linear_step(data=2)
    model = model_of(pipeline)
    given = batches(4)
    with TrainingRunner(pipeline, in_process=True) as session:
        for x, target in given[:2]:
            session.step(x, target, lr=LR)
            model.step(x, target, LR)
        state = session.state()
        assert session.state(["w1"]).keys() == {"w1"}
    with TrainingRunner(linear_step("gpipe", microbatches=4), in_process=True) as other:
        other.load_state(state)
        for x, target in given[2:]:
            assert_close(other.step(x, target, lr=LR), model.step(x, target, LR))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"v": torch.zeros(1)}, "no state named 'v'"),
        ({"w0": torch.zeros(2, 2).double()}, r"'w0' is torch.float64\[2, 2\], the pipeline has"),
        ({"w0": torch.zeros(WIDTH, WIDTH)}, r"'w0' is torch.float32"),
    ],
)
def test_state_that_does_not_fit(state: dict[str, Tensor], message: str) -> None:
    with TrainingRunner(linear_step(), in_process=True) as session:
        with pytest.raises(WeightError, match=message):
            session.load_state(state)
        with pytest.raises(WeightError, match="no state named 'u'"):
            session.state(["u"])


def test_who_has_what() -> None:
    with TrainingRunner(linear_step(data=2), in_process=True) as session:
        slices = session.slices()
        assert list(slices) == ["d0", "d1", "d2", "d3"]
        assert {whole.name for whole in slices["d3"].values()} == {
            "w1", "optimizer.w1.momentum_buffer",
        }  # fmt: skip
        assert slices["d3"]["w1.1"].placements == ((0, WIDTH), (0, WIDTH))


# --- requests --------------------------------------------------------------------------------


def test_a_function_is_called_on_every_slot() -> None:
    with TrainingRunner(linear_step(), in_process=True) as session:
        name = "shardwright.runtime.memory:peak_memory"
        found = session.call_workers(name)
        assert list(found) == ["d0", "d1"]
        assert all(count > 0 for count in found.values())
        with pytest.raises(RunError, match=r"functions of shardwright\.\* only, not 'os:getcwd'"):
            session.call_workers("os:getcwd")
        assert_close(
            session.step(*batches(1)[0], lr=LR)["loss"],
            LinearModel(2).step(*batches(1)[0], LR)["loss"],
        )


def test_a_reply_has_tensors_of_its_own() -> None:
    assert Reply("value").tensors == {}


# --- evaluation ------------------------------------------------------------------------------


def evaluation(rows: int = 4, *, name: str = "w1", start: int = 0) -> Pipeline:
    """The model of `linear_step` on two slots; its outputs are scaled by a constant of its own."""
    sketch = Sketch(2)
    tensor = sketch.input("x", (rows, WIDTH), dtype="f64")
    for i in range(2):
        if i:
            tensor = sketch.send(tensor, "d0", "d1")
        weight = sketch.constant(f"w{i}", torch.zeros(WIDTH, WIDTH, dtype=torch.float64))
        sketch.fx(
            f"d{i}.0", f"d{i}", [tensor, weight], [f"y{i}"],
            lambda b, x, w: b.call("aten.mm.default", x, w),
        )  # fmt: skip
        tensor = f"y{i}"
    scale = sketch.constant("scale", torch.tensor(2.0, dtype=torch.float64))
    sketch.fx("d1.1", "d1", [tensor, scale], ["z"], lambda b, x, s: b.call("aten.mul.Tensor", x, s))
    pipeline = sketch.finish(["z"])
    value = pipeline.tensors["w1"].value
    assert value is not None
    value.name = name
    value.placements = ((start, start + WIDTH), (0, WIDTH))
    return pipeline


def test_a_model_is_evaluated_with_the_parameters_as_they_are() -> None:
    pipeline, small, large = linear_step(), evaluation(), evaluation(ROWS)
    model = model_of(pipeline)
    with TrainingRunner(pipeline, in_process=True) as session:
        for x, target in batches(3):
            future = session.submit(x, target, lr=LR)
            loss = model.step(x, target, LR)["loss"]
            assert_close(session.evaluate(small, x[:4]), 2 * model.outputs(x[:4]))
            assert_close(session.evaluate(large, x), 2 * model.outputs(x))
            assert_close(future.result()["loss"], loss)
        assert len(session._loaded) == 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: evaluation(start=3), r"'d1' needs 'w1' \[3:6, 0:3\], which is not what it has"),
        (lambda: evaluation(name="w0"), "'d1' needs 'w0'"),
        (lambda: chain(3), r"has the device slots d0, d1, d2, the workers are d0, d1; build it"),
        (linear_step, "is of a training step"),
    ],
    ids=["another part", "on another slot", "other slots", "a step"],
)
def test_a_model_that_is_not_the_trained_one(wrong: Any, message: str) -> None:
    with TrainingRunner(linear_step(), in_process=True) as session:
        pipeline = wrong()
        with pytest.raises(RunError, match=message):
            session.evaluate(pipeline, torch.zeros(4, WIDTH).double())


def test_a_session_that_is_forgotten_ends() -> None:
    session = TrainingRunner(linear_step(), in_process=True)
    finalizer = session._finalizer
    del session
    gc.collect()
    assert not finalizer.alive


def test_a_schedule_that_there_is_not_is_refused() -> None:
    pipeline = linear_step()
    assert pipeline.training is not None
    assert pipeline.training.schedule is not None
    pipeline.training.schedule.kind = "1f1c"
    with pytest.raises(PipelineError, match=r"training\.schedule\.kind is '1f1c'"):
        TrainingRunner(pipeline, in_process=True)
