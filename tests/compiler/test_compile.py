"""Compiled models and steps give what eager ones give, in the program's own tensors."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

import shardwright as sw
from shardwright.errors import (
    CaptureError,
    DeviceError,
    ExecError,
    InputError,
    PlanError,
    WeightError,
)
from tests.compiler.steps import OPTIMIZERS, Program, Tied, assert_close, batches, network, program
from tests.trainable import TASKS
from tests.turns import rotated

STEPS = 100


# --- optimizers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_hundred_steps_of_an_optimizer_are_torchs(name: str, warm: bool) -> None:
    """The loss is linear in the parameters: their gradients are the inputs, bit for bit."""

    def make() -> tuple[nn.ParameterList, torch.optim.Optimizer, Callable[..., Tensor]]:
        torch.manual_seed(0)
        weights = nn.ParameterList([nn.Parameter(torch.randn(7, 5)), nn.Parameter(torch.randn(9))])
        optimizer = OPTIMIZERS[name](list(weights))

        def step(x: Tensor, z: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = (weights[0] * x).sum() + (weights[1] * z).sum()
            loss.backward()
            optimizer.step()
            return loss

        return weights, optimizer, step

    weights, optimizer, step = make()
    expected, reference, eager = make()
    draws = torch.Generator().manual_seed(1)
    inputs = [
        (torch.randn(7, 5, generator=draws), torch.randn(9, generator=draws)) for _ in range(STEPS)
    ]
    for x, z in inputs[:3] if warm else ():
        step(x, z)
        eager(x, z)
    run = sw.compile(step, *inputs[0])
    for x, z in inputs:
        run(x, z)
        eager(x, z)
    for found, wanted in zip(weights, expected, strict=True):
        assert_close(found, wanted, 1e-6, name)
        state = optimizer.state[found]
        assert state.keys() == {k for k, v in reference.state[wanted].items() if v is not None}
        for key, tensor in state.items():
            assert_close(tensor, reference.state[wanted][key], 1e-6, key)


CASES: dict[str, dict[str, Any]] = {
    "norm": {},
    "scheduler": {"scheduler": lambda optimizer: StepLR(optimizer, 10, 0.7)},
    "clipping": {"clip": 0.5},
    "tied and frozen": {"model": Tied},
    "no norm": {"model": lambda: network(norm=False)},
}


@pytest.mark.parametrize(("case", "name"), rotated(list(CASES), ["momentum", "adam", "adamw"]))
def test_a_hundred_steps_of_a_network_are_eagers(case: str, name: str) -> None:
    def make() -> Any:
        made = program(OPTIMIZERS[name], **{"dtype": torch.float64, **CASES[case]})
        made.step(*batches(1, dtype=torch.float64)[0])
        return made

    made, eager = make(), make()
    data = batches(STEPS, dtype=torch.float64)
    run = sw.compile(made.step, *data[0])
    for x, y in data:
        assert_close(run(x, y), eager.step(x, y), 1e-9)
    expected = eager.state()
    assert made.state().keys() == expected.keys()
    for key, tensor in made.state().items():
        assert_close(tensor, expected[key], 1e-9, key)


# --- whole programs ------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype"), rotated(list(TASKS), [torch.float64, torch.float32]))
def test_models_and_their_steps(name: str, dtype: torch.dtype) -> None:
    """Of a key's bias the gradient is rounding alone, which Adam magnifies: in f32 losses count."""
    task = TASKS[name]

    def make() -> tuple[nn.Module, Callable[..., Tensor]]:
        torch.manual_seed(0)
        model = task.model().to(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def step(*batch: Tensor) -> Tensor:
            *args, labels = batch
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(*args).flatten(0, -2), labels.flatten())
            loss.backward()
            optimizer.step()
            return loss

        return model, step

    torch.manual_seed(1)
    batch = [t.to(dtype) if t.is_floating_point() else t for t in task.batch()]
    (model, step), (other, eager) = make(), make()
    tolerance = 1e-5 if dtype == torch.float32 else 1e-9
    run = sw.compile(step, *batch)
    for _ in range(3):
        assert_close(run(*batch), eager(*batch), tolerance)
    if dtype == torch.float64:
        expected = other.state_dict()
        for key, tensor in model.state_dict().items():
            assert_close(tensor, expected[key], 1e-7, key)
    model.eval()
    forward = sw.compile(model, *batch[:-1])
    with torch.no_grad():
        assert_close(forward(*batch[:-1]), model(*batch[:-1]), tolerance)


def test_results_have_the_structure_of_the_original() -> None:
    class Pair(nn.Module):
        def forward(self, x: Tensor, *, scale: float = 2.0) -> dict[str, Any]:
            return {"twice": (x * scale, [x + 1]), "same": x, "none": None}

    x = torch.randn(3)
    run = sw.compile(Pair(), x, scale=3.0)
    found = run(x, scale=3.0)
    assert torch.equal(found["twice"][0], x * 3)
    assert torch.equal(found["twice"][1][0], x + 1)
    assert torch.equal(found["same"], x)
    assert found["same"].data_ptr() != x.data_ptr()
    assert found["none"] is None
    assert torch.equal(run(x)["twice"][0], x * 2), "another constant has a capture of its own"


def test_buffers_change_in_place() -> None:
    model, eager = network(), network()
    eager.load_state_dict(model.state_dict())
    x = torch.randn(8, 6)
    buffer = model[1].running_mean
    run = sw.compile(model, x)
    for _ in range(2):
        assert_close(run(x), eager(x).detach(), 1e-5)
    assert model[1].running_mean is buffer
    assert_close(buffer, eager[1].running_mean, 1e-6)
    assert model[1].num_batches_tracked.item() == 2


def test_the_rate_of_a_scheduler_outside_the_step_is_seen() -> None:
    made, eager = program(OPTIMIZERS["sgd"]), program(OPTIMIZERS["sgd"])
    schedules = [StepLR(p.optimizer, 1, 0.5) for p in (made, eager)]
    run = sw.compile(made.step, *batches(1)[0])
    for x, y in batches(5):
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # no warning of a rate that changes before a step
            run(x, y)
            schedules[0].step()
        eager.step(x, y)
        schedules[1].step()
    for key, tensor in made.state().items():
        assert_close(tensor, eager.state()[key], 1e-5, key)


def test_steps_of_eager_and_compiled_programs_may_take_turns() -> None:
    made, eager = program(OPTIMIZERS["adam"]), program(OPTIMIZERS["adam"])
    run = sw.compile(made.step, *batches(1)[0])
    for number, (x, y) in enumerate(batches(6)):
        (run if number % 2 else made.step)(x, y)
        eager.step(x, y)
    for key, tensor in made.state().items():
        assert_close(tensor, eager.state()[key], 1e-4, key)


def test_state_that_was_loaded_is_used() -> None:
    made, other = program(OPTIMIZERS["adam"]), program(OPTIMIZERS["adam"])
    for batch in batches(2):
        other.step(*batch)
    run = sw.compile(made.step, *batches(1)[0])
    run(*batches(1)[0])
    made.model.load_state_dict(other.model.state_dict())
    made.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))
    run(*batches(3)[2])
    other.step(*batches(3)[2])
    for key, tensor in made.state().items():
        assert_close(tensor, other.state()[key], 1e-4, key)


def test_two_steps_share_an_optimizer() -> None:
    """Both are compiled before either has made any state."""

    def make() -> tuple[Program, Callable[..., Tensor]]:
        made = program(OPTIMIZERS["momentum"], dtype=torch.float64)

        def other(x: Tensor, y: Tensor) -> Tensor:
            made.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(3 * made.model(x), y)
            loss.backward()
            made.optimizer.step()
            return loss

        return made, other

    (made, second), (eager, eager_second) = make(), make()
    data = batches(6, dtype=torch.float64)
    runs = [sw.compile(step, *data[0]) for step in (made.step, second)]
    for number, batch in enumerate(data):
        runs[number % 2](*batch)
        (eager.step, eager_second)[number % 2](*batch)
        for key, tensor in made.state().items():
            assert_close(tensor, eager.state()[key], 1e-9, key)


def test_state_that_is_cleared_or_loaded_is_seen() -> None:
    made, eager = (program(OPTIMIZERS["adam"], dtype=torch.float64) for _ in range(2))
    data = batches(6, dtype=torch.float64)
    run = sw.compile(made.step, *data[0])
    for number, batch in enumerate(data):
        for one in (made, eager):
            if number == 2:
                one.optimizer.state.clear()
            if number == 4:
                one.optimizer.load_state_dict(copy.deepcopy(one.optimizer.state_dict()))
        run(*batch)
        eager.step(*batch)
    for key, tensor in made.state().items():
        assert_close(tensor, eager.state()[key], 1e-9, key)


@pytest.mark.parametrize("found", [False, True], ids=["none yet", "gradients there"])
@pytest.mark.parametrize("to_none", [False, True], ids=["zeros", "none"])
def test_a_loop_that_clears_the_gradients_around_the_step(to_none: bool, found: bool) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer, Callable[..., Tensor]]:
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if found:
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 0.5)

        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        return model, optimizer, step

    (model, optimizer, step), (other, reference, eager) = make(), make()
    run = sw.compile(step, *batches(1)[0])
    for number, batch in enumerate(batches(6)):
        if number % 2:
            optimizer.zero_grad(set_to_none=to_none)
            reference.zero_grad(set_to_none=to_none)
        if number == 4:  # another tensor, as a loop sets that clips by itself
            for parameter in (*model.parameters(), *other.parameters()):
                parameter.grad = torch.ones_like(parameter)
        run(*batch)
        eager(*batch)
        for mine, its in zip(model.parameters(), other.parameters(), strict=True):
            assert mine.grad is not None
            assert its.grad is not None
            assert_close(mine.grad, its.grad, 1e-5)
            assert_close(mine, its, 1e-5)


def test_the_threads_are_given() -> None:
    model = network().eval()
    x = torch.randn(8, 6)
    run = sw.compile(model, x, threads=2)
    assert_close(run(x), model(x).detach(), 1e-5)
    with pytest.raises(ExecError, match="threads=0"):
        sw.compile(model, x, threads=0)


def test_it_prints_its_plan() -> None:
    text = str(sw.compile(network().eval(), torch.randn(8, 6)))
    assert text.startswith("plan Sequential:")
    assert "gemm(" in text


# --- without examples ----------------------------------------------------------------------------


def test_a_model_without_examples_is_captured_by_its_first_call() -> None:
    model, x = network().eval(), torch.randn(8, 6)
    run = sw.compile(model, device="cpu")
    assert run.captures == 0
    assert "call it first" in str(run)
    for ask in (lambda: run.plan, lambda: run.graph, lambda: run.run({"input": x})):
        with pytest.raises(InputError, match="not captured yet"):
            ask()
    run.refresh()
    assert_close(run(x), model(x).detach(), 1e-5)
    assert run.captures == 1
    assert str(run) == str(run.plan)


def test_a_step_without_examples_is_captured_by_its_first_call() -> None:
    made, eager = program(OPTIMIZERS["adamw"]), program(OPTIMIZERS["adamw"])
    run = sw.compile(made.step, device="cpu")
    for x, y in batches(3):
        assert_close(run(x, y), eager.step(x, y), 1e-5)
    assert run.captures == 1


def test_what_takes_nothing_needs_no_examples() -> None:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3))

        def forward(self) -> Tensor:
            return self.weight * 2

    model = Alone()
    run = sw.compile(model)
    assert run.captures == 1
    assert torch.equal(run(), model.weight.detach() * 2)


# --- what cannot be compiled ---------------------------------------------------------------------


def test_a_model_without_weights() -> None:
    with sw.empty_weights():
        model = nn.Linear(6, 2)
    with pytest.raises(WeightError, match="'weight' has no contents"):
        sw.compile(model, torch.randn(3, 6))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without CUDA devices refuses")
def test_a_device_that_is_not_there() -> None:
    with pytest.raises(DeviceError, match="no CUDA device"):
        sw.compile(nn.Linear(6, 2), torch.randn(3, 6), device="cuda")
    with pytest.raises(DeviceError, match="one of cpu, cuda"):
        sw.compile(nn.Linear(6, 2), torch.randn(3, 6), device="xpu")


@pytest.mark.parametrize("device", ["gpu", "cpu:x", 1.5])
def test_what_is_no_device(device: Any) -> None:
    with pytest.raises(DeviceError, match=f"device={device!r} is no device.*cpu, cuda"):
        sw.compile(nn.Linear(6, 2), torch.randn(3, 6), device=device)


def test_what_is_no_program() -> None:
    with pytest.raises(InputError, match="takes an nn"):
        sw.compile(3, torch.ones(1))  # type: ignore[arg-type]


def test_a_rate_that_follows_the_loss() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = ReduceLROnPlateau(optimizer)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        schedule.step(loss)
        return loss

    with pytest.raises((InputError, CaptureError)):
        sw.compile(step, *batches(1)[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threads": "2"}, "threads='2'; it is a whole number from 1 up"),
        ({"threads": 1.5}, r"threads=1\.5; it is a whole number from 1 up"),
        ({"threads": 0}, "threads=0; it is a whole number from 1 up"),
        ({"replay": "inference"}, "replay='inference'; give a sw.Replaying"),
    ],
)
def test_options_of_another_type_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ExecError, match=message):
        sw.compile(nn.Linear(2, 2), torch.ones(1, 2), **options)


def test_what_is_no_program_is_named_by_its_type() -> None:
    with pytest.raises(InputError, match=r"found <class 'torch.nn.modules.linear.Linear'>"):
        sw.compile(nn.Linear, torch.ones(1, 2))  # type: ignore[arg-type]
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    graph = sw.capture(model, (torch.ones(1, 2),))
    with pytest.raises(
        InputError, match=r"Pipeline'>\. Tasks of a pipeline are lowered by sw.lower"
    ):
        sw.compile(sw.build(graph, sw.plan(graph, devices=2)))  # type: ignore[arg-type]


def test_a_function_without_a_backward_is_no_step() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(PlanError, match=r"calls no backward.*compiled as a module"):
        sw.compile(lambda x: model(x).sum(), torch.ones(1, 2))


def test_a_sparse_input_is_refused_by_name() -> None:
    run = sw.compile(nn.Linear(2, 2), torch.ones(1, 2))
    with pytest.raises(InputError, match=r"'input' is torch.sparse_coo.*to_dense\(\)"):
        run(torch.ones(1, 2).to_sparse())
    with pytest.raises(InputError, match=r"'input' is torch.sparse_coo"):
        run.run({"input": torch.ones(1, 2).to_sparse()})
