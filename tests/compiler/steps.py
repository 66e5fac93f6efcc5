"""Training steps of ordinary programs, each as a function that makes one from nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS, WIDTH, CLASSES = 8, 6, 3


@dataclass
class Program:
    """A model, its optimizer, and a step; ``schedulers`` are stepped by the step itself."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[..., Any]

    def state(self) -> dict[str, Tensor]:
        """Everything that a step may change, by name."""
        found = dict(self.model.state_dict())
        names = {id(p): name for name, p in self.model.named_parameters()}
        for parameter, state in self.optimizer.state.items():
            for key, tensor in state.items():
                found[f"{names[id(parameter)]}.{key}"] = torch.as_tensor(tensor)
        return {name: tensor.detach().clone() for name, tensor in found.items()}


def batches(count: int, rows: int = ROWS, dtype: torch.dtype = torch.float32) -> list[Any]:
    draws = torch.Generator().manual_seed(7)
    return [
        (
            torch.randn(rows, WIDTH, generator=draws).to(dtype),
            torch.randint(CLASSES, (rows,), generator=draws),
        )
        for _ in range(count)
    ]


def network(*, dropout: float = 0.0, norm: bool = True) -> nn.Module:
    # A bias before the norm has no effect: its gradient is rounding, which Adam magnifies.
    layers: list[nn.Module] = [nn.Linear(WIDTH, 16, bias=not norm)]
    layers += [nn.BatchNorm1d(16)] if norm else []
    layers += [nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, CLASSES)]
    return nn.Sequential(*layers)


class Tied(nn.Module):
    """The first layer's weight is also the last one's; the middle is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(torch.tanh(self.first(x))))[:, :CLASSES]


def program(
    optimizer: Callable[..., torch.optim.Optimizer],
    model: Callable[[], nn.Module] = network,
    *,
    scheduler: Callable[..., Any] | None = None,
    clip: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> Program:
    """A program whose weights are the same each time it is made."""
    torch.manual_seed(3)
    made = model().to(dtype)
    trained = [p for p in made.parameters() if p.requires_grad]
    chosen = optimizer(trained)
    schedule = scheduler(chosen) if scheduler is not None else None

    def step(x: Tensor, y: Tensor) -> Tensor:
        chosen.zero_grad()
        loss = F.cross_entropy(made(x), y)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(trained, clip)
        chosen.step()
        if schedule is not None:
            schedule.step()
        return loss

    return Program(made, chosen, step)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.8, 0.9), eps=1e-6),
}


def assert_close(found: Tensor, expected: Tensor, tolerance: float, name: str = "") -> None:
    """The project's measure: max|a - b| <= tolerance * max|b|."""
    assert found.shape == expected.shape, name
    assert found.dtype == expected.dtype, name
    if expected.numel():
        difference = (found.double() - expected.double()).abs().max().item()
        assert difference <= tolerance * expected.double().abs().max().item(), (name, difference)
