"""Regions: inlined, with gradients and casts as in the program; others refused."""

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


def operators(graph: Any) -> list[str]:
    return [node.op.split(".")[1] for node in graph.nodes]


# --- regions without gradient ------------------------------------------------------------


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


# --- autocast ----------------------------------------------------------------------------


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


# --- what has more than one path ---------------------------------------------------------


def test_control_flow_operators_are_refused(x: torch.Tensor) -> None:
    def chosen(m: Any, x: Any) -> Any:
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))

    with pytest.raises(CaptureError, match=r"`return torch.cond.*torch\.where"):
        captured(chosen, x.detach())
    with pytest.raises(CaptureError, match="vmap"):
        captured(lambda m, x: torch.vmap(torch.sum)(x), x)


# --- operators ---------------------------------------------------------------------------


def test_gradient_checkpoints_are_inlined(x: torch.Tensor) -> None:
    def function(m: Any, x: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(m.linear, x, use_reentrant=False)

    assert operators(assert_same(function, x)) == ["linear"]


def test_recurrent_network() -> None:
    assert_same(nn.LSTM(4, 3, num_layers=2, batch_first=True), torch.randn(2, 5, 4))


def test_transformer_layers() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    assert_same(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(2, 5, 8))


def test_operators_of_other_libraries(x: torch.Tensor) -> None:
    @torch.library.custom_op("tracingtest::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    graph = assert_same(lambda m, x: twice(x.detach()), x)
    assert graph.nodes[-1].op == "tracingtest.twice.default"


def test_profiler_ranges_are_left_out(x: torch.Tensor) -> None:
    def function(m: Any, x: Any) -> Any:
        with torch.profiler.record_function("range"):
            return m.linear(x)

    assert operators(assert_same(function, x)) == ["linear"]
