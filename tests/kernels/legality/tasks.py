"""Good lowered tasks: forward, backward and update of small models, calls by name among them."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwright as sw
from tests.runtime.programs import gpt, tokens


class Images(nn.Module):
    """Convolutions with norms and pools."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.norm, self.last = nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.first(x))), 2)
        x = F.adaptive_avg_pool2d(x + self.second(x), 1)
        return self.last(x.flatten(1))


class Places(nn.Module):
    """Operators that take places from contents, and others that are torch's alone."""

    def forward(self, x: Tensor, rows: Tensor, picked: Tensor) -> tuple[Tensor, ...]:
        taken = x.index_select(0, rows).gather(1, picked)
        added = torch.zeros_like(x).index_add(0, rows, x).scatter_add(1, picked, taken)
        best, at = x.topk(2, 1)
        wide = F.interpolate(x[None, None], scale_factor=2.0, mode="bilinear")
        bent = F.pad(x[None], (1, 1), mode="reflect").cumsum(-1)
        seen = F.grid_sample(
            x[None, None],
            torch.zeros_like(wide[:, :1, :2, :2, None])[..., [0, 0]][:, 0],
            align_corners=False,
        )
        return added, best, at, wide, bent, F.embedding(rows, x), x[rows, rows], seen, x.sort(1)[0]


class Rest(nn.Module):
    """Other operators that no native kernel takes, with their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 6, padding_idx=1)
        self.group, self.up = nn.GroupNorm(2, 4), nn.ConvTranspose2d(4, 2, 2, stride=2)
        self.rows = nn.Linear(6, 6)

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        found = self.rows(self.table(rows))
        image = self.up(self.group(x))
        small, at = F.max_pool2d(image, 2, return_indices=True)
        back = F.max_unpool2d(small, at, 2) + F.avg_pool2d(
            F.pad(image, (1, 1, 1, 1), "reflect"), 3, 1
        )
        wide = F.interpolate(back, size=(5, 7), mode="bilinear")
        pieces = F.fold(F.unfold(wide, 2), (5, 7), 2)
        strided = torch.as_strided(found, (3, 4), (1, 2)).logcumsumexp(0)
        best, _ = found.kthvalue(2, -1)
        apart = torch.cdist(found, found.roll(1, 0).flip(1)) + found.cumprod(1)[:, :1]
        summed = torch.zeros(5, 6).index_put((rows,), found, accumulate=True)
        put = torch.zeros(6).scatter_reduce(0, rows, found[:, 0], "amax")
        terms = (pieces, strided, best, apart, summed, put, torch.fft.rfft(found).abs())
        return sum((term.square().mean() for term in terms), torch.zeros(()))


def _texts(pipeline: sw.Pipeline) -> set[str]:
    lowered = sw.lower(pipeline)
    tasks = lowered.supertasks.items()
    return {lowered.data_of(name) for name, task in tasks if task.kind == "dfg"}


def _step(made: Any, batch: Any) -> set[str]:
    graph = sw.compile_ir(made.step, *batch)
    return _texts(sw.build(graph, sw.plan(graph, devices=2)))


def _images() -> set[str]:
    torch.manual_seed(0)
    model, x = Images(), torch.randn(2, 3, 8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: Tensor, target: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        return loss

    graph = sw.compile_ir(step, x, torch.randn(2, 4))
    return _texts(sw.build(graph, sw.plan(graph, devices=1)))


def _places() -> set[str]:
    rows, picked = torch.tensor([0, 2, 1, 1]), torch.zeros(4, 3, dtype=torch.long)
    graph = sw.capture(Places(), (torch.randn(4, 6), rows, picked))
    return _texts(sw.build(graph, sw.plan(graph, devices=1)))


def _rest() -> set[str]:
    torch.manual_seed(0)
    model = Rest()
    optimizer = torch.optim.Adam(model.parameters(), amsgrad=True)

    def step(x: Tensor, rows: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x, rows)
        loss.backward()
        optimizer.step()
        return loss

    graph = sw.compile_ir(step, torch.randn(2, 4, 4, 4), torch.tensor([0, 2, 4, 4]))
    return _texts(sw.build(graph, sw.plan(graph, devices=1)))


@cache
def texts() -> list[str]:
    """Tasks of all models, in one order."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return sorted(_step(gpt(0.1), tokens(1)[0]) | _images() | _places() | _rest())
