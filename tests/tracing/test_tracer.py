"""Tracing leaves the model as before, and prints nothing."""

import types
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shardwright.errors import CaptureError
from shardwright.tracing import capture
from tests.tracing.equality import Module, captured


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, 4)


def test_model_is_unchanged(x: torch.Tensor) -> None:
    def function(m: Any, x: Any) -> Any:
        m.calls += 1
        m.last = x * 2
        m.steps = m.steps + 1
        m.average.mul_(0.5).add_(x.mean(0))
        return F.dropout(m.linear(x), 0.5, m.training) + m.last

    model = Module(function).train()
    model.calls = 0
    model(x).sum().backward()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    tensors = [*model.parameters(), *model.buffers()]
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    calls, last, state = model.calls, model.last, torch.random.get_rng_state()

    graph = capture(model, (x,))

    assert torch.equal(torch.random.get_rng_state(), state)
    assert model.training
    assert (model.calls, model.last) == (calls, last)
    for found, kept in zip([*model.parameters(), *model.buffers()], tensors, strict=True):
        assert found is kept
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradient)
    assert len(graph.updates) == 2


def test_model_is_unchanged_after_a_failure(x: torch.Tensor) -> None:
    def function(m: Any, x: Any) -> Any:
        m.calls = 1
        m.average = m.average + 1
        raise ValueError("in mid-forward")

    model = Module(function)
    average = model.average
    with pytest.raises(CaptureError, match="in mid-forward"):
        capture(model, (x,))
    assert model.average is average
    assert not hasattr(model, "calls")


def test_capture_gives_no_warnings(x: torch.Tensor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        captured(lambda m, x: m.linear(x).add_(1), x)


class Installs(nn.Module):
    """Installs hooks at its first call, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.seen: list[int] = []
        self.notes = types.SimpleNamespace(calls={"number": 0})
        self.installed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.installed:
            for layer in self.layers:
                layer.register_forward_hook(lambda *_: self.seen.append(len(self.seen)))
                layer.register_forward_pre_hook(lambda *_: None)
            self.installed = True
        self.notes.calls["number"] += 1
        made: torch.Tensor = self.layers(x)
        return made


def test_hooks_and_containers_of_a_model_are_unchanged(x: torch.Tensor) -> None:
    model = Installs()
    capture(model, (x,))
    assert not model.installed
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    assert (model.seen, model.notes.calls) == ([], {"number": 0})
    model(x)
    capture(model, (x,))
    assert [len(layer._forward_hooks) for layer in model.layers] == [1, 1]
    assert (model.seen, model.notes.calls) == ([0, 1], {"number": 1})
