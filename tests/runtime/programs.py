"""Programs to train in tests: ordinary steps for one device, and a loop through them."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH = 8, 16


@dataclass
class Trained:
    """A model, its optimizer, and a step and an evaluation of both."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[..., Any]
    evaluate: Callable[..., Any]
    scheduler: Any = None

    def loop(self, batches: list[Any]) -> list[float]:
        """The losses of an ordinary loop."""
        losses = []
        for batch in batches:
            losses.append(self.step(*batch).item())
            if self.scheduler is not None:
                self.scheduler.step()
        return losses

    def copied(self) -> "Trained":
        """The same at this point, with tensors of its own."""
        model, optimizer = copy.deepcopy((self.model, self.optimizer))
        return trained(model, optimizer)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any = None) -> Trained:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    def evaluate(x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = model(x)
        loss = F.cross_entropy(logits.flatten(0, -2), y.flatten())
        return {"loss": loss, "accuracy": (logits.argmax(-1) == y).float().mean()}

    return Trained(model, optimizer, step, evaluate, scheduler)


def perceptron(dropout: float = 0.0, hidden: int = WIDTH) -> Trained:
    """Four layers on rows of numbers."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for width in (WIDTH, hidden, hidden):
        layers += [nn.Linear(width, hidden), nn.Tanh(), nn.Dropout(dropout)]
    model = nn.Sequential(*layers, nn.Linear(hidden, 4))
    return trained(model, torch.optim.AdamW(model.parameters(), lr=0.01))


class GPT(nn.Module):
    """Two blocks, whose embedding is also the head."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        # A bias of the keys has no effect: its gradient is rounding alone, which Adam magnifies.
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.proj = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, 20, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tokens(x)
        for norm, qkv, proj in zip(self.norms, self.qkv, self.proj, strict=True):
            q, k, v = (
                part.unflatten(-1, (2, -1)).transpose(1, 2) for part in qkv(norm(x)).chunk(3, -1)
            )
            seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.dropout(proj(seen.transpose(1, 2).flatten(2)))
        return self.head(x)


def gpt(dropout: float = 0.0) -> Trained:
    """A decoder on rows of tokens."""
    torch.manual_seed(0)
    model = GPT(dropout)
    return trained(model, torch.optim.AdamW(model.parameters(), lr=0.01))


def rows(count: int, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches for `perceptron`."""
    draws = torch.Generator().manual_seed(seed)
    x = torch.randn(count, ROWS, WIDTH, generator=draws)
    return [(one, one[:, :4].argmax(-1)) for one in x]


def tokens(count: int, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches for `gpt`."""
    draws = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 20, (count, ROWS, 7), generator=draws)
    return [(one[:, :-1], one[:, 1:]) for one in x]


def some_short(batches: list[Any]) -> list[Any]:
    """Batches of which some have fewer rows than the first."""
    sizes = {2: 5, 3: 6, 6: 5}
    return [
        tuple(tensor[: sizes.get(number)] for tensor in batch)
        for number, batch in enumerate(batches)
    ]
