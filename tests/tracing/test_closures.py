"""The ways in which a step function may reach its models, optimizers and tensors."""

import contextlib
import functools
import random
import re
import types
from collections import deque
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from shardwright.errors import CaptureError
from shardwright.ir import IRGraph
from shardwright.tracing import CaptureWarning, compile_ir
from shardwright.tracing.closures import find_closure, unchanged
from tests.tracing.stepping import assert_unchanged, snapshot

X = torch.ones(4, 3)

global_model = nn.Linear(3, 2)
global_optimizer = torch.optim.SGD(global_model.parameters(), lr=0.1)


def global_step(x: torch.Tensor) -> torch.Tensor:
    return helper(x)


def helper(x: torch.Tensor) -> torch.Tensor:
    loss = global_model(x).sum()
    loss.backward()
    global_optimizer.step()
    return loss


def names(graph: IRGraph) -> list[str]:
    """Names of the parameters that the step updates."""
    return [
        name for node in graph.nodes if node.op == "sgd_step" for name in node.attrs["parameters"]
    ]


def given_step(model: nn.Module, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).sum()
    loss.backward()
    optimizer.step()
    return loss


class Trainer:
    """A trainer as people write them; ``steps`` counts and ``losses`` collects."""

    def __init__(self) -> None:
        self.parts = {"model": nn.Linear(3, 2)}
        self.optimizers = [torch.optim.SGD(self.parts["model"].parameters(), lr=0.1)]
        self.steps = 0
        self.losses: list[torch.Tensor] = []

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        loss = given_step(self.parts["model"], self.optimizers[0], x)
        self.losses.append(loss.detach())
        return loss

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.step(x)


class Module(nn.Module):
    """A module that holds its own optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, x: torch.Tensor) -> torch.Tensor:
        return given_step(self.linear, self.optimizer, x)


def with_defaults(
    x: torch.Tensor, model: Any = global_model, *, optimizer: Any = global_optimizer
) -> torch.Tensor:
    return given_step(model, optimizer, x)


def through_a_module(x: torch.Tensor) -> torch.Tensor:
    return given_step(program.model, program.optimizer, x)


program = types.ModuleType("program")
program.__file__ = "program.py"
program.model = nn.Linear(3, 2)
program.optimizer = torch.optim.SGD(program.model.parameters(), lr=0.1)

STEPS = {
    "globals": global_step,
    "method": Trainer().step,
    "object": Trainer(),
    "partial": functools.partial(given_step, global_model, optimizer=global_optimizer),
    "defaults": lambda x, m=global_model, o=global_optimizer: given_step(m, o, x),
    "module": through_a_module,
    "decorated": functools.wraps(global_step)(lambda x: global_step(x)),
}


@pytest.mark.parametrize("kind", STEPS)
def test_steps_are_functions_of_any_kind(kind: str) -> None:
    step = STEPS[kind]
    before = snapshot(step)
    args, kwargs = ((X,), {}) if kind != "partial" else ((), {"x": X})
    counts = kind in ("method", "object")
    with pytest.warns(CaptureWarning) if counts else contextlib.nullcontext():
        graph = compile_ir(step, *args, **kwargs)
    assert names(graph) == ["weight", "bias"]
    assert_unchanged(before, snapshot(step))


def test_a_module_that_holds_its_optimizer() -> None:
    module = Module()
    graph = compile_ir(module.training_step, X)
    assert names(graph) == ["linear.weight", "linear.bias"]
    assert {scope.path for node in graph.nodes for scope in node.scopes} == {"linear"}


def changed(caught: pytest.WarningsRecorder) -> set[str]:
    """The variables that warnings say a step changes."""
    found = (re.search(r"the step changes '([^']*)'", str(one.message)) for one in caught)
    return {match[1] for match in found if match}


def test_what_python_keeps_is_put_back() -> None:
    trainer = Trainer()
    with pytest.warns(CaptureWarning) as caught:
        compile_ir(trainer.step, X)
    assert changed(caught) == {"losses", "step.steps"}
    assert (trainer.steps, trainer.losses) == (0, [])

    count = 0

    def step(x: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return trainer.step(x) + count

    with pytest.warns(CaptureWarning) as caught:
        compile_ir(step, X)
    assert count == 0
    assert changed(caught) == {"losses", "trainer.steps", "count"}


def test_modules_without_parameters_keep_the_models_names() -> None:
    model = nn.Linear(3, 2)
    criterion = nn.CrossEntropyLoss(weight=torch.ones(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    graph = compile_ir(step, X, torch.zeros(4, dtype=torch.int64))
    stored = {value.names[0]: value.role for value in graph.stored()}
    assert stored["weight"] == "param"
    assert stored["criterion.weight"] == "buffer"
    assert [scope.path for node in graph.nodes for scope in node.scopes] == ["criterion"]


def test_parts_of_a_model_belong_to_the_model() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    head, weight = model[1], model[0].weight

    def step(x: torch.Tensor) -> torch.Tensor:
        return head(model[0](x)).sum() + weight.sum()

    closure = find_closure(step)
    assert closure.modules == {"model": model}
    assert closure.tensors == {}
    stored = {value.names[0] for value in compile_ir(step, X).stored()}
    assert stored == {"0.weight", "0.bias", "1.weight", "1.bias"}


def test_a_step_may_take_nothing_and_return_nothing() -> None:
    batch = torch.ones(4, 3)

    def step() -> None:
        given_step(global_model, global_optimizer, batch)

    graph = compile_ir(step)
    assert graph.outputs == []
    assert [graph.values[value_id].name for value_id in graph.inputs] == ["lr"]
    assert {value.names[0] for value in graph.stored() if value.role == "constant"} == {"batch"}


def test_an_argument_named_as_the_rate() -> None:
    def step(x: torch.Tensor, lr: torch.Tensor) -> torch.Tensor:
        return given_step(global_model, global_optimizer, x * lr)

    with pytest.raises(CaptureError, match="argument 'lr'"):
        compile_ir(step, X, torch.ones(()))


def test_what_is_no_function() -> None:
    with pytest.raises(CaptureError, match="takes a function, found 3"):
        compile_ir(3)  # type: ignore[arg-type]
    with pytest.raises(CaptureError, match="global_step: the arguments do not fit"):
        compile_ir(global_step)


# --- what a step changes is put back --------------------------------------------------------------


calls: list[int] = []
level = 0


def step(history: Any = calls) -> None:
    global level
    level += 1
    history.append(level)


def test_globals_and_containers() -> None:
    with unchanged(find_closure(step)):
        step()
        assert (calls, level) == ([1], 1)
    assert (calls, level) == ([], 0)


def test_containers_keep_their_identity_and_order() -> None:
    held = {"list": [1, 2], "set": {1}, "dict": {"b": 1, "a": 2}, "deque": deque([1], maxlen=1)}

    def change() -> None:
        held["list"].reverse()
        held["set"].clear()
        held["dict"].update(c=3)
        held["deque"].append(2)
        held["new"] = []

    before = dict(held)
    with unchanged(find_closure(change)):
        change()
    assert held == {"list": [1, 2], "set": {1}, "dict": {"b": 1, "a": 2}, "deque": deque([1])}
    assert all(held[key] is before[key] for key in before)


def draw() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(numpy.random.rand())


def failing() -> None:
    draw()
    torch.set_grad_enabled(False)
    raise ValueError("on the way")


def run_unchanged() -> None:
    with unchanged(find_closure(failing)):
        failing()


def test_random_numbers_and_settings_on_every_path() -> None:
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    expected = draw()
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    numpy.random.set_state(states[2])
    with pytest.raises(ValueError, match="on the way"):
        run_unchanged()
    assert torch.is_grad_enabled()
    assert draw() == expected
