"""Gradients: they flow in the graph where they flow in the program, and nowhere else."""

from typing import Any

import pytest
import torch

from shardwright.errors import CaptureError
from shardwright.tracing import capture
from tests.tracing.equality import Module, assert_same, captured, operators


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, 4, requires_grad=True)


def test_no_grad_regions_are_inlined_and_stop_gradients(x: torch.Tensor) -> None:
    def function(m: Any, x: Any) -> Any:
        with torch.no_grad():
            scale = m.linear(x).abs() + 1
            with torch.enable_grad():
                inner = x * 3
        return m.linear(x) / scale + inner

    assert operators(assert_same(function, x)).count("detach") == 1


def test_no_detach_where_there_is_no_gradient(x: torch.Tensor) -> None:
    def function(m: Any, x: Any) -> Any:
        with torch.no_grad():
            angles = torch.arange(4.0) * m.average
        return x * angles.cos()

    assert operators(assert_same(function, x)) == ["arange", "mul", "cos", "mul"]


def test_buffers_are_written_without_gradient(x: torch.Tensor) -> None:
    def function(m: Any, x: Any) -> Any:
        with torch.no_grad():
            m.average.lerp_(x.mean(0), 0.1)
        m.steps += x.detach().sum()
        return m.linear(x) + m.average

    assert len(assert_same(function, x).updates) == 2


def test_detach(x: torch.Tensor) -> None:
    assert_same(lambda m, x: m.linear(x).detach() * x + x.detach().detach_(), x)


def test_writing_without_gradient_to_what_has_one_is_refused(x: torch.Tensor) -> None:
    def function(m: Any, x: Any) -> Any:
        y = m.linear(x)
        with torch.no_grad():
            y.mul_(2)
        return y

    with pytest.raises(CaptureError, match=r"`y.mul_\(2\)`.*another gradient"):
        captured(function, x)
    with pytest.raises(CaptureError, match="another gradient"):
        captured(lambda m, x: m.linear(x).detach().mul_(2), x)
    with torch.no_grad():
        assert_same(function, x)


def test_capture_without_gradient_needs_no_detach(x: torch.Tensor) -> None:
    with torch.no_grad():
        graph = captured(lambda m, x: m.linear(x).detach(), x)
    assert operators(graph) == ["linear"]
    model = Module(lambda m, x: m.linear(x).detach())
    with torch.inference_mode():
        assert operators(capture(model, (x,))) == ["linear"]
