"""Fusing residuals and activations into convolutions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.compiler.passes.epilogue import fuse_convolutions
from shardwright.ir import IRGraph
from shardwright.ir.validate import validate
from shardwright.kernels.operators import CONV

Function = Callable[[nn.ModuleList, torch.Tensor], torch.Tensor]


class Two(nn.Module):
    """A function of two convolutions."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convs = nn.ModuleList([nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)])
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.convs, x)


def fused(model: nn.Module, dtype: torch.dtype = torch.float32) -> IRGraph:
    """The graph after the pass, whose result is that of the graph before, bit for bit."""
    x = torch.randn(2, 4, 8, 8, dtype=dtype, generator=torch.Generator().manual_seed(1))
    before = sw.capture(model.eval().requires_grad_(False).to(dtype), (x,))
    after = fuse_convolutions(before)
    validate(after)
    torch.testing.assert_close(after.run(x), before.run(x), rtol=0, atol=0)
    return after


FUSED: dict[str, tuple[Function, int]] = {
    "relu": (lambda c, x: c[0](x).relu(), 1),
    "gelu": (lambda c, x: nn.functional.gelu(c[0](x)), 1),
    "gelu tanh": (lambda c, x: nn.functional.gelu(c[0](x), approximate="tanh"), 1),
    "silu": (lambda c, x: nn.functional.silu(c[0](x)), 1),
    "tanh": (lambda c, x: c[0](x).tanh(), 1),
    "sigmoid": (lambda c, x: c[0](x).sigmoid(), 1),
    "residual": (lambda c, x: x + c[0](x), 1),
    "residual and relu": (lambda c, x: (c[0](x) + x).relu(), 1),
    "two in a row": (lambda c, x: (c[1](c[0](x).relu()) + x).relu(), 2),
    "later residual": (lambda c, x: c[0](x) + x.exp().sin(), 1),
}


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_what_follows_is_fused(name: str, dtype: torch.dtype) -> None:
    function, count = FUSED[name]
    found = Counter(node.op for node in fused(Two(function), dtype).nodes)
    assert found.pop(CONV) == count
    assert set(found) <= {"aten.exp.default", "aten.sin.default"}


def test_of_two_convolutions_that_are_added_one_adds() -> None:
    graph = fused(Two(lambda c, x: (c[0](x) + c[1](x)).relu()))
    assert [node.op for node in graph.nodes] == ["aten.conv2d.default", CONV]
    assert len(graph.nodes[1].inputs) == 4


ALONE: dict[str, Function] = {
    "nothing follows": lambda c, x: c[0](x),
    "read twice": lambda c, x: (y := c[0](x)).relu() + y.exp(),
    "doubled": lambda c, x: (y := c[0](x)) + y,
    "scaled": lambda c, x: torch.add(x, c[0](x), alpha=2),
    "broadcast": lambda c, x: c[0](x) + x.mean((2, 3), keepdim=True),
    "a number": lambda c, x: c[0](x) + 1.0,
}


@pytest.mark.parametrize("name", ALONE)
def test_what_cannot_be_fused(name: str) -> None:
    assert CONV not in {node.op for node in fused(Two(ALONE[name])).nodes}


def test_an_output_between_is_still_made() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 1)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.conv(x)
            return y, y.relu()

    x = torch.randn(1, 4, 5, 5)
    graph = sw.capture(Both().requires_grad_(False), (x,))
    assert fuse_convolutions(graph) is graph
