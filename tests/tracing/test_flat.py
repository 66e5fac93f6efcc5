"""The flat module around a model: assigned buffers, and inputs that share nothing."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shardwright.errors import CaptureError
from shardwright.tracing import capture
from tests.tracing.equality import Module, assert_same, captured


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, 4, requires_grad=True)


def test_assigned_buffers_become_updates(x: torch.Tensor) -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count = self.count + 1
            return x * self.count

    graph = assert_same(nn.Sequential(Inner(), Inner()), x)
    assert [graph.values[old].name for old in graph.updates] == ["0.count", "1.count"]


def test_a_buffer_keeps_its_shape(x: torch.Tensor) -> None:
    def function(m: Any, x: Any) -> Any:
        m.average = torch.cat([m.average, m.average])
        return x

    with pytest.raises(CaptureError, match=r"'average'.*keeps its shape"):
        captured(function, x)


def test_same_tensor_twice_is_two_inputs(x: torch.Tensor) -> None:
    graph = captured(lambda m, a, b: a - 2 * b, x, x)
    y = torch.randn(3, 4)
    assert torch.equal(graph.run(x, y), x - 2 * y)


def test_overlapping_inputs_are_two_inputs(x: torch.Tensor) -> None:
    graph = captured(lambda m, a, b: a.clone().add_(b), x, x[:1])
    y = torch.randn(1, 4)
    assert torch.equal(graph.run(x, y), x + y)


def test_a_parameter_as_input_is_an_input(x: torch.Tensor) -> None:
    model = Module(lambda m, w, x: F.linear(x, w) + F.linear(x, m.linear.weight))
    graph = capture(model, (model.linear.weight, x))
    other = torch.randn(4, 4)
    expected = F.linear(x, other) + F.linear(x, model.linear.weight)
    assert torch.equal(graph.run(other, x), expected)
