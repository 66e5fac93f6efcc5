"""Buffers and parameters that a step writes, read or not: afterwards as eager leaves them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.errors import PlanError
from tests.building.test_composed_operators import stepper

WAYS = ({"data": 1}, {"pipeline": 2}, {"data": 2}, {"tensor": 2}, None)
"""Meshes to train on; None is a compiled step."""


class Writing(nn.Module):
    """Two layers and buffers, and what is done before the first."""

    def __init__(self, writes: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.last: torch.Tensor
        self.count: torch.Tensor
        self.register_buffer("last", torch.zeros(8))
        self.register_buffer("count", torch.zeros(()))
        self.writes = writes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.b(self.writes(self, x))
        return made


def _statistics(m: Writing, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = m.a(x)
    m.last.copy_(y.detach().mean(0))
    return y


def _assigned(m: Writing, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = m.a(x)
    m.last = y.detach().mean(0)
    m.count += 1
    return y


def _of_the_input(m: Writing, x: torch.Tensor) -> torch.Tensor:
    m.last.copy_(x[0])
    m.count.fill_(3.0)
    y: torch.Tensor = m.a(x)
    return y


def _clamped(m: Writing, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        m.a.weight.clamp_(-0.1, 0.1)
    y: torch.Tensor = m.a(x)
    return y


def _of_unit_rows(m: Writing, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        m.a.weight.div_(m.a.weight.norm(dim=1, keepdim=True))
        m.a.bias[0] = 0
    y: torch.Tensor = m.a(x) + m.a(x * 2).relu()
    return y


def _spectral() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 8))


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{
        function.__name__.strip("_"): lambda function=function: Writing(function)  # type: ignore[misc]
        for function in (_statistics, _assigned, _of_the_input, _clamped, _of_unit_rows)
    },
    "spectral norm": _spectral,
}


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_what_a_step_writes_is_what_eager_leaves(name: str, way: dict[str, int] | None) -> None:
    torch.manual_seed(0)
    eager = MODELS[name]().double()
    ours = copy.deepcopy(eager)
    batches = [torch.randn(4, 8, dtype=torch.float64) for _ in range(2)]
    step = stepper(eager)
    for batch in batches:
        step(batch)
    if way is None:
        program = sw.compile(stepper(ours), batches[0])
        for batch in batches:
            program(batch)
    else:
        sw.train(stepper(ours), batches, mesh=way, epochs=1, quiet=True, in_process=True)
    found = ours.state_dict()
    for key, expected in eager.state_dict().items():
        assert torch.allclose(found[key], expected, rtol=1e-11, atol=1e-13), key


def test_an_empty_tensor_between_slots_is_an_error_that_says_so() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).eval()
    x = torch.randn(0, 4)
    graph = sw.capture(model, (x,))
    with pytest.raises(PlanError, match="has no elements"):
        sw.build(graph, sw.plan(graph, devices=2))
    alone = sw.build(graph, sw.plan(graph, devices=1))
    assert sw.run(alone, x, in_process=True).shape == (0, 4)


def test_a_parameter_that_is_overwritten_everywhere_is_named() -> None:
    def overwritten(m: Writing, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = m.a(x)
        y[...] = x * 2
        return y

    with pytest.raises(PlanError, match=r"does not depend on parameter 'a\.weight'"):
        sw.train(
            stepper(Writing(overwritten)),
            [torch.randn(4, 8)],
            mesh={"data": 1},
            epochs=1,
            quiet=True,
            in_process=True,
        )
