"""SGD of 16-bit floats on the CPU is what it is written out, where torch's fused kernel is not."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.ir.overloads import callable_of

HALVES = (torch.bfloat16, torch.float16)
OPTIONS: tuple[dict[str, Any], ...] = (
    {"momentum": 0.0},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    {"momentum": 0.0, "maximize": True},
)
each_option = pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(options))
each_half = pytest.mark.parametrize("dtype", HALVES, ids=str)


@each_half
@each_option
@pytest.mark.parametrize("in_place", [False, True])
def test_the_fused_step_is_that_of_float32_rounded(
    dtype: torch.dtype, options: dict[str, Any], in_place: bool
) -> None:
    torch.manual_seed(0)
    sizes = (3, 16, 40, 101)
    momenta = sizes if options["momentum"] else ()
    lists = [[torch.randn(n).to(dtype) for n in each] for each in (sizes, sizes, momenta)]
    wide = [[tensor.float() for tensor in tensors] for tensors in lists]
    flags = {"weight_decay": 0.0, "dampening": 0.0, "nesterov": False, "maximize": False}
    given = {"lr": torch.tensor(0.1), "is_first_step": False, **flags, **options}
    torch.ops.aten._fused_sgd_.tensor_lr(*wide, **given)
    packet = torch.ops.aten._fused_sgd_ if in_place else torch.ops.aten._fused_sgd
    made = callable_of(packet.tensor_lr)(*lists, **given)
    for news, wanted in zip(lists if in_place else made, wide, strict=True):
        for new, want in zip(news, wanted, strict=True):
            assert torch.equal(new, want.to(dtype))


def step_of(model: nn.Module, options: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, **options)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


@each_half
@each_option
@pytest.mark.parametrize("lowered", [False, True])
def test_training_in_halves_is_eager_training(
    dtype: torch.dtype, options: dict[str, Any], lowered: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).to(dtype)
    x = torch.randn(8, 16).to(dtype)
    eager = step_of(deepcopy(model), options)
    graph = sw.compile_ir(step_of(model, options), x)
    pipeline = sw.build(graph, sw.plan(graph, devices=1))
    rate = torch.tensor(0.5, dtype=torch.float64)
    with sw.Session(sw.lower(pipeline) if lowered else pipeline, in_process=True) as session:
        for _ in range(4):
            assert float(session.step(x, lr=rate)) == pytest.approx(float(eager(x)), rel=0.03)
