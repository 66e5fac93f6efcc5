"""Operators that torch composes in C++, changing shapes in place: trained as in eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwright as sw
from tests.turns import rotated

WAYS = ("pipeline", "compiled", "data")
"""Two slots along an axis, or a compiled step."""


class Through(nn.Module):
    """A linear layer and what a function makes of a part and of what the layer makes."""

    def __init__(
        self, part: nn.Module, function: Callable[[Any, torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__()
        self.first, self.part = nn.Linear(8, 8), part
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.part, self.first(x))


def _state(part: Any, x: torch.Tensor) -> torch.Tensor:
    made, state = part(x)
    return made.mean() + sum(one.square().mean() for one in state)


def _warp(size: tuple[int, ...], *, align: bool) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    def warp(part: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        rank = len(size)
        image = x.reshape(x.shape[0], 1, *(4, 4, 3)[:rank], -1)[..., 0] * 10
        moved = torch.eye(rank, rank + 1, dtype=x.dtype) + part.weight[:rank, : rank + 1] * 0.1
        theta = moved.expand(x.shape[0], rank, rank + 1)
        grid = F.affine_grid(theta, [x.shape[0], 1, *size], align_corners=align)
        return F.grid_sample(image, grid, align_corners=align)

    return warp


def _between_transposes(part: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return part(x.transpose(1, 2)).transpose(1, 2).reshape(x.shape[0], -1)


RECURRENT: dict[str, Callable[[], nn.Module]] = {
    f"{kind.__name__} {given}": lambda kind=kind, given=given: kind(8, 8, **given)  # type: ignore[misc]
    for kind in (nn.LSTM, nn.GRU, nn.RNN)
    for given in (
        {},
        {"batch_first": True},
        {"batch_first": True, "bidirectional": True, "num_layers": 2},
        {"bias": False},
    )
}
CASES: dict[str, Callable[[], Through]] = {
    **{
        name: lambda make=make: Through(make(), lambda part, x: part(x)[0])  # type: ignore[misc]
        for name, make in RECURRENT.items()
    },
    "state of an LSTM": lambda: Through(nn.LSTM(8, 8), lambda part, x: _state(part, x)),
    "projection": lambda: Through(nn.LSTM(8, 8, proj_size=4), lambda part, x: part(x)[0]),
    "relu": lambda: Through(
        nn.RNN(8, 8, nonlinearity="relu", batch_first=True), lambda part, x: part(x)[0]
    ),
    "cells": lambda: Through(nn.GRUCell(8, 8), lambda part, x: part(x[:, 0])),
    "affine_grid": lambda: Through(nn.Linear(8, 8), _warp((4, 6), align=False)),
    "affine_grid of three dimensions": lambda: Through(
        nn.Linear(8, 8), _warp((2, 4, 6), align=True)
    ),
    "layer norm between transposes": lambda: Through(nn.LayerNorm(6), _between_transposes),
    "group norm between transposes": lambda: Through(nn.GroupNorm(2, 8), _between_transposes),
    "batch norm between transposes": lambda: Through(nn.BatchNorm1d(8), _between_transposes),
}


def stepper(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.5)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


@pytest.mark.parametrize(("name", "way"), rotated(list(CASES), list(WAYS)))
def test_it_is_trained_as_in_eager(name: str, way: str) -> None:
    if name.startswith("batch norm") and way == "data":
        pytest.skip("the statistics are those of a shard")
    torch.manual_seed(0)
    eager = CASES[name]().double()
    ours = copy.deepcopy(eager)
    batches = [torch.randn(4, 6, 8, dtype=torch.float64) for _ in range(2)]
    step = stepper(eager)
    for batch in batches:
        step(batch)
    if way == "compiled":
        program = sw.compile(stepper(ours), batches[0])
        for batch in batches:
            program(batch)
    else:
        sw.train(stepper(ours), batches, mesh={way: 2}, epochs=1, quiet=True, in_process=True)
    for (key, expected), found in zip(
        eager.state_dict().items(), ours.state_dict().values(), strict=True
    ):
        assert torch.allclose(found, expected, rtol=1e-11, atol=1e-13), key
