"""Operators and regions: what stays, what is inlined, what is left out, what is refused."""

from typing import Any

import pytest
import torch
from torch import nn

from shardwright.errors import CaptureError
from tests.tracing.equality import assert_same, captured, operators


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, 4, requires_grad=True)


def test_control_flow_operators_are_refused(x: torch.Tensor) -> None:
    def chosen(m: Any, x: Any) -> Any:
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))

    with pytest.raises(CaptureError, match=r"`return torch.cond.*torch\.where"):
        captured(chosen, x.detach())
    with pytest.raises(CaptureError, match="vmap"):
        captured(lambda m, x: torch.vmap(torch.sum)(x), x)


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
