"""Norms in training: the same results, statistics and gradients as eager, bit for bit."""

import pytest
import torch
from torch import nn

from tests.tracing.equality import assert_same


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_batch_norm(affine: bool, layout: torch.memory_format) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4, affine=affine), nn.ReLU())
    x = torch.randn(2, 3, 5, 5).contiguous(memory_format=layout)
    graph = assert_same(model, x)
    names = sorted(graph.values[old].name for old in graph.updates)
    assert names == ["1.num_batches_tracked", "1.running_mean", "1.running_var"]


def test_batch_norm_twice_in_one_forward() -> None:
    norm = nn.BatchNorm1d(4)
    assert_same(nn.Sequential(norm, nn.Linear(4, 4), norm), torch.randn(6, 4))


def test_batch_norm_without_statistics_or_in_eval_updates_nothing() -> None:
    x = torch.randn(6, 4)
    for model in (nn.BatchNorm1d(4, track_running_stats=False), nn.BatchNorm1d(4).eval()):
        graph = assert_same(model, x)
        assert not graph.updates
        assert [node.op for node in graph.nodes] == ["aten.batch_norm.default"]


@pytest.mark.parametrize("affine", [True, False])
def test_instance_norm(affine: bool) -> None:
    model = nn.InstanceNorm2d(3, affine=affine, track_running_stats=True)
    graph = assert_same(model, torch.randn(2, 3, 4, 4))
    assert len(graph.updates) == 2
    assert not assert_same(nn.InstanceNorm2d(3), torch.randn(2, 3, 4, 4)).updates


def test_batch_norm_in_lower_precision() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y: torch.Tensor = self.norm(self.conv(x))
            return y

    assert len(assert_same(Model(), torch.randn(2, 3, 5, 5)).updates) == 3
