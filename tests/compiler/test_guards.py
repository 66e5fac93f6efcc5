"""A compiled program computes with the program as it is at the call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.errors import CaptureError
from tests.compiler.steps import assert_close


class Net(nn.Module):
    """Weights that are packed, folded, copied and constant, and a plain number."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8)
        self.drop, self.last = nn.Dropout(0.5), nn.Linear(8, 4)
        self.scale, self.factor = torch.full((4,), 2.0), 1.5

    def forward(self, x: Tensor) -> Tensor:
        made = self.drop(self.norm(self.conv(x)).relu().mean((2, 3)))
        return self.last(made) * (self.scale.exp() * self.factor)


@torch.no_grad()
def _double(model: Net) -> None:
    for tensor in (*model.parameters(), model.norm.running_mean, model.scale):
        assert tensor is not None
        tensor.mul_(2)


def _in_inference_mode(model: Net) -> None:
    with torch.inference_mode():
        model.last.weight.mul_(2)


def _by_data(model: Net) -> None:
    model.last.weight.data = model.last.weight.data * 2


def _load(model: Net, *, assign: bool) -> None:
    model.load_state_dict({k: t * 2 for k, t in model.state_dict().items()}, assign=assign)


def _train_eagerly(model: Net) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    model(torch.randn(2, 2, 6, 6)).sum().backward()
    optimizer.step()


@torch.no_grad()
def _norm_eagerly(model: Net) -> None:
    """Its statistics are written where torch counts nothing."""
    model.norm.train()(torch.randn(4, 8, 3, 3) + 9)
    model.norm.eval()


def _train_compiled(model: Net) -> None:
    """Its update writes where torch does not see it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    sw.compile(step, torch.randn(2, 2, 6, 6))(torch.randn(2, 2, 6, 6))


def _replace_parameter(model: Net) -> None:
    model.last.weight = nn.Parameter(torch.randn(4, 8))


def _replace_module(model: Net) -> None:
    model.last = nn.Linear(8, 4, bias=False)


def _replace_buffer(model: Net) -> None:
    model.norm.running_mean = torch.randn(8)


def _to_double_and_back(model: Net) -> None:
    model.double()
    model.last.weight.data.mul_(3)
    model.float()


def _set_number(model: Net) -> None:
    model.factor = 3.0


def _set_eps(model: Net) -> None:
    model.norm.eps = 0.5


CHANGES: dict[str, Callable[[Net], object]] = {
    "in place": _double,
    "in inference mode": _in_inference_mode,
    "by .data =": _by_data,
    "load_state_dict": lambda model: _load(model, assign=False),
    "load_state_dict(assign=True)": lambda model: _load(model, assign=True),
    "an eager step": _train_eagerly,
    "statistics of a batch norm": _norm_eagerly,
    "a compiled step": _train_compiled,
    "another parameter": _replace_parameter,
    "another module": _replace_module,
    "another buffer": _replace_buffer,
    ".double() and .float()": _to_double_and_back,
    "a plain attribute": _set_number,
    "a layer's attribute": _set_eps,
}


@pytest.mark.parametrize("rows", [2, 300])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen_at_the_next_call(change: str, rows: int) -> None:
    torch.manual_seed(0)
    model, x = Net().eval(), torch.randn(rows, 2, 6, 6)
    run = sw.compile(model, x)
    before = run(x)
    CHANGES[change](model)
    with torch.no_grad():
        expected = model(x)
    assert not torch.allclose(before, expected, rtol=1e-3, atol=1e-3)
    assert_close(run(x), expected, 1e-5)
    assert_close(run.run({"x": x})["output"], expected, 1e-5)
    assert_close(run(x=x), expected, 1e-5)


def test_captures_of_all_shapes_follow_a_change() -> None:
    model, xs = Net().eval(), [torch.randn(rows, 2, 6, 6) for rows in (2, 5)]
    run = sw.compile(model, xs[0])
    run(xs[1])
    _double(model)
    with torch.no_grad():
        for x in (*xs, *xs):
            assert_close(run(x), model(x), 1e-5)
    assert run.captures == 2


def test_weights_that_are_packed_alone_need_no_other_capture() -> None:
    model, x = nn.Linear(16, 16).eval(), torch.randn(4, 16)
    run = sw.compile(model, x)
    graph, plan = run.graph, run.plan
    with torch.no_grad():
        model.weight.mul_(2)
    assert_close(run(x), model(x).detach(), 1e-5)
    assert run.graph is graph
    assert run.plan is plan


def test_modes_have_captures_of_their_own() -> None:
    model, x = Net().train(), torch.randn(4, 2, 6, 6)
    run = sw.compile(model, x)
    assert not torch.equal(run(x), run(x)), "it drops out"
    model.eval()
    with torch.no_grad():
        assert_close(run(x), model(x), 1e-5)
        model.norm.train()
        means = model.norm.running_mean
        assert means is not None
        before = means.clone()
        found, made = run(x), means.clone()
        means.copy_(before)
        assert_close(found, model(x), 1e-5)
        assert_close(made, means, 1e-5)
    for _ in range(2):
        for mode in (model.train, model.eval):
            mode()
            run(x)
    assert run.captures == 3


# --- steps ---------------------------------------------------------------------------------------


class Step:
    """A step whose objects a test changes."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.0), nn.Linear(6, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scale = torch.full((2,), 2.0)
        model, optimizer, scale = self.model, self.optimizer, self.scale

        def run(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = (model(x) * scale.exp()).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        self.run: Callable[[Tensor], Tensor] = run


def _freeze(step: Step) -> None:
    step.model[0].requires_grad_(False)
    for parameter in step.model[0].parameters():
        parameter.grad = None


def _by_optimizer_state(step: Step) -> None:
    state = step.optimizer.state_dict()
    state["param_groups"][0].update(weight_decay=0.5, momentum=0.5)
    step.optimizer.load_state_dict(state)


def _add_group(step: Step) -> None:
    step.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})


STEP_CHANGES: dict[str, Callable[[Step], object]] = {
    "weight decay": lambda step: step.optimizer.param_groups[0].update(weight_decay=0.5),
    "load_state_dict": _by_optimizer_state,
    "another group": _add_group,
    "a constant": lambda step: step.scale.mul_(0.5),
    "frozen parameters": _freeze,
    "a layer's attribute": lambda step: setattr(step.model[2], "bias", None),
}


@pytest.mark.filterwarnings("ignore:.*aren't updated.*")
@pytest.mark.parametrize("change", STEP_CHANGES)
def test_a_change_of_a_steps_program_is_seen_at_the_next_call(change: str) -> None:
    found, eager = Step(), Step()
    x = torch.randn(4, 6)
    run = sw.compile(found.run, x)
    for _ in range(2):
        assert_close(run(x), eager.run(x), 1e-5)
    for step in (found, eager):
        STEP_CHANGES[change](step)
    for _ in range(3):
        assert_close(run(x), eager.run(x), 1e-5)
    for key, tensor in eager.model.state_dict().items():
        assert_close(found.model.state_dict()[key], tensor, 1e-5, key)


def test_parameters_that_the_optimizer_does_not_have_are_refused() -> None:
    step, x = Step(), torch.randn(4, 6)
    run = sw.compile(step.run, x)
    run(x)
    twice = {key: tensor * 2 for key, tensor in step.model.state_dict().items()}
    step.model.load_state_dict(twice, assign=True)
    with pytest.raises(CaptureError, match="finds no gradient"):
        run(x)


def test_hyper_parameters_that_change_at_each_call_are_warned_of() -> None:
    step, x = Step(), torch.randn(4, 6)
    run = sw.compile(step.run, x)

    def cycle() -> None:
        for number in range(1, 9):
            step.optimizer.param_groups[0]["momentum"] = number / 10
            run(x)

    with pytest.warns(RuntimeWarning, match="captured for the 8th time"):
        cycle()


def test_eager_training_of_written_weights_is_noticed_by_autograd() -> None:
    """What a compiled step writes is counted: a backward through it is torch's error, no number."""
    step, x = Step(), torch.randn(4, 6)
    run = sw.compile(step.run, x)
    loss = step.model(x).sum()
    run(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_step_takes_its_batch_by_keyword() -> None:
    def make() -> tuple[Step, Callable[..., Tensor]]:
        step = Step()

        def run(**batch: Tensor) -> Tensor:
            return step.run(batch["x"] + batch["y"])

        return step, run

    (found, run), (eager, reference) = make(), make()
    batch = {"x": torch.randn(4, 6), "y": torch.randn(4, 6)}
    compiled = sw.compile(run, **batch)
    for _ in range(3):
        assert_close(compiled(**batch), reference(**batch), 1e-5)
    assert_close(compiled.run(batch)["output"], reference(**batch), 1e-5)
    for key, tensor in eager.model.state_dict().items():
        assert_close(found.model.state_dict()[key], tensor, 1e-5, key)


# --- threads and modes ---------------------------------------------------------------------------


def test_calls_from_several_threads_wait_for_one_another() -> None:
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))]
    model = nn.Sequential(*layers).eval()
    run = sw.compile(model, torch.randn(256, 64))
    xs = [torch.randn(rows, 64) for rows in (256, 256, 300)]
    with torch.no_grad():
        expected = [model(x) for x in xs]
    wrong: list[Any] = []

    def call(x: Tensor, wanted: Tensor) -> None:
        try:
            for _ in range(50):
                assert_close(run(x), wanted, 1e-4)
                assert_close(run.run({"input": x})["output"], wanted, 1e-4)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=call, args=pair) for pair in zip(xs, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_program_that_was_compiled_in_inference_mode_runs_outside() -> None:
    model, x = nn.Linear(4, 4).eval(), torch.randn(2, 4)
    with torch.inference_mode():
        run = sw.compile(model, x)
        run(x)
    assert_close(run(x), model(x).detach(), 1e-5)
    assert not run(x.clone().requires_grad_()).requires_grad
