"""Autocast regions: the same results and gradients, with every cast a node."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.tracing.equality import Module, assert_same, captured, operators


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, 4, requires_grad=True)


def test_autocast_is_written_as_casts(x: torch.Tensor) -> None:
    def function(m: Any, x: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = m.linear(x)
            z = F.mse_loss(y, y.t().reshape(3, 4)) + torch.einsum("ij,kj->ik", x, x).sum()
            with torch.autocast("cpu", enabled=False):
                z = z + (x @ x.t()).sum()
            w = torch.cat([x, y])
        return y, z, w, m.linear(x)

    graph = assert_same(function, x)
    assert operators(graph)[:4] == ["to", "to", "to", "linear"]


def test_a_value_is_cast_once(x: torch.Tensor) -> None:
    def function(m: Any, x: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return m.linear(m.linear(x))

    assert operators(assert_same(function, x)).count("to") == 3


def test_autocast_around_capture(x: torch.Tensor) -> None:
    model = Module(lambda m, x: m.linear(x).softmax(-1) @ x.t())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        graph = captured(model.function, x)
        expected = model(x)
    assert torch.equal(graph.run(x), expected)


def test_autocast_for_another_device_does_nothing(x: torch.Tensor) -> None:
    def function(m: Any, x: Any) -> Any:
        with torch.autocast("cuda", enabled=False):
            return m.linear(x)

    assert operators(assert_same(function, x)) == ["linear"]


def test_autocast_and_no_grad_nest(x: torch.Tensor) -> None:
    def function(m: Any, x: Any) -> Any:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            y = m.linear(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = m.linear(x)
            z.add_(1)
            with torch.no_grad():
                w = m.linear(x)
        return y + z + w

    assert_same(function, x)
