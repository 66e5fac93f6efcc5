"""Models whose work is split over slots, float64, with what they are called with."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.building.small_models import Gpt

WIDTH = 20


class Mlp(nn.Module):
    """Two layers with biases, and a residual around them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 30)
        self.down = nn.Linear(30, WIDTH)
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.down(F.gelu(self.up(self.norm(x)))))


class Decoder(Gpt):
    """Two blocks between a lookup table and a head that are one parameter."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__(width=WIDTH, heads=heads, length=8)


class UnevenDecoder(Decoder):
    """Five heads, which no even number of slots shares evenly."""

    def __init__(self) -> None:
        super().__init__(heads=5)


class Gated(nn.Module):
    """A scale of its own on a partial sum, and a maximum over features."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.down(torch.tanh(self.up(x))) * self.scale
        return y, self.up(x).amax(-1)


class Tied(nn.Module):
    """A parameter that layers far apart have together, one along rows, one along columns."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Linear(WIDTH, WIDTH, bias=False),
            nn.GELU(),
            nn.Linear(WIDTH, WIDTH, bias=False),
            nn.GELU(),
            nn.Linear(WIDTH, WIDTH, bias=False),
            nn.GELU(),
        )
        self.last = nn.Sequential(
            nn.Linear(WIDTH, WIDTH, bias=False),
            nn.GELU(),
            nn.Linear(WIDTH, WIDTH, bias=False),
            nn.GELU(),
            nn.Linear(WIDTH, WIDTH, bias=False),
        )
        self.last[2].weight = self.first[2].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


class Extreme(nn.Module):
    """Maxima and minima of features that are equal on several slots, unevenly."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 24)
        with torch.no_grad():
            self.up.weight[[3, 7, 14, 15, 20]] = 0.0
            self.up.bias[[3, 7, 14, 15, 20]] = 9.0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        up = self.up(x)
        return up.amax(-1), (-up).amin(-1)


def gpt2() -> nn.Module:
    """GPT-2, of two layers."""
    import transformers

    config = transformers.GPT2Config(
        vocab_size=40, n_positions=16, n_embd=16, n_layer=2, n_head=4, use_cache=False
    )
    return transformers.GPT2LMHeadModel(config)


def bert() -> nn.Module:
    """BERT, of two layers."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=32,
        max_position_embeddings=16,
    )
    return transformers.BertForMaskedLM(config)


TRANSFORMERS: dict[str, Callable[[], nn.Module]] = {"gpt2": gpt2, "bert": bert}

MODELS: dict[str, type[nn.Module]] = {
    "mlp": Mlp,
    "decoder": Decoder,
    "uneven": UnevenDecoder,
    "gated": Gated,
    "tied": Tied,
    "extreme": Extreme,
}


def made(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model with the same parameters at each call, and its arguments."""
    torch.manual_seed(0)
    if name in TRANSFORMERS:
        model = TRANSFORMERS[name]().double().eval()
        return model, (torch.randint(40, (4, 8)),)
    model = MODELS[name]().double()
    if name in ("mlp", "gated", "tied", "extreme"):
        return model, (torch.randn(6, 5, WIDTH, dtype=torch.float64),)
    return model, (torch.randint(40, (4, 8)),)


def named_outputs(made: object) -> dict[str, Tensor]:
    """A model's outputs by the names that ports have."""
    if isinstance(made, Tensor):
        return {"output": made}
    if isinstance(made, tuple):
        return {f"output_{i}": tensor for i, tensor in enumerate(made)}
    assert isinstance(made, dict)
    return dict(made)


def weighted(output: Tensor, ranges: tuple[tuple[int, int], ...] = ()) -> Tensor:
    """A number of which each element of an output has its own share; ``ranges`` are a slice's."""
    for dim, (start, end) in enumerate(ranges or [(0, size) for size in output.shape]):
        weight = torch.cos(torch.arange(start, end, dtype=torch.float64) * (dim + 1) + 1)
        output = output * weight.view(-1, *[1] * (output.ndim - dim - 1))
    return output.sum()
