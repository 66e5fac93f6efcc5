"""Models in plain torch.nn to train in tests: they compute in their weights' dtype throughout.

Each is two blocks small, or three, and learns by heart what `TASKS` gives it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.experiments.models import SIDE, ResNet
from benchmarks.models import GPT

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH = 24, 32, 4, 2, 8
BATCH = 8
CLASSES = 4


class Norm(nn.Module):
    """Root mean square norm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(nn.Module):
    """Attention with fewer heads of keys and values than of queries, rotated or with a bias."""

    def __init__(self, groups: int = HEADS, *, causal: bool = True, rotary: bool = False) -> None:
        super().__init__()
        self.size, self.causal, self.rotary = WIDTH // HEADS, causal, rotary
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key = nn.Linear(WIDTH, groups * self.size, bias=False)
        self.value = nn.Linear(WIDTH, groups * self.size, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(
        self, x: Tensor, memory: Tensor | None = None, bias: Tensor | None = None
    ) -> Tensor:
        source = x if memory is None else memory
        query, key, value = (
            layer(given).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for layer, given in ((self.query, x), (self.key, source), (self.value, source))
        )
        if self.rotary:
            query, key = rotate(query), rotate(key)
        groups = HEADS // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = query @ key.transpose(-1, -2) / self.size**0.5
        if bias is not None:
            scores = scores + bias
        if self.causal:
            places = torch.arange(x.shape[1])
            scores = scores.masked_fill(places[:, None] < places, -torch.inf)
        return self.out((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))


def rotate(x: Tensor) -> Tensor:
    """Rotary positions: pairs of columns turn with the place in the sequence."""
    half = x.shape[-1] // 2
    speeds = 100.0 ** -(torch.arange(half, dtype=x.dtype) / half)
    angles = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * speeds
    one, other = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)


class Gated(nn.Module):
    """A feed-forward layer with a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Four feed-forward layers, of which each token is given to the best two."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, count, bias=False)
        self.up = nn.Parameter(torch.randn(count, WIDTH, WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(count, WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor) -> Tensor:
        best, chosen = self.router(x).softmax(-1).topk(2, -1)
        best = best / best.sum(-1, keepdim=True)
        shares = torch.zeros_like(self.router(x)).scatter(-1, chosen, best)
        inside = F.silu(torch.einsum("blw,ewh->belh", x, self.up))
        made = torch.einsum("belh,ehw->belw", inside, self.down)
        return (made * shares.transpose(1, 2).unsqueeze(-1)).sum(1)


class Block(nn.Module):
    """Attention, for a decoder to an encoder as well, and a feed-forward layer."""

    def __init__(
        self, attention: nn.Module, layer: nn.Module, cross: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.norm, self.attention = Norm(), attention
        self.cross_norm, self.cross = (Norm(), cross) if cross else (None, None)
        self.layer_norm, self.layer = Norm(), layer

    def forward(
        self, x: Tensor, memory: Tensor | None = None, bias: Tensor | None = None
    ) -> Tensor:
        x = x + self.attention(self.norm(x), bias=bias)
        if self.cross is not None:
            x = x + self.cross(self.cross_norm(x), memory)
        return x + self.layer(self.layer_norm(x))


class Decoder(nn.Module):
    """A language model of such blocks."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(LAYERS))
        self.norm = Norm()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class T5(nn.Module):
    """Encoder and decoder, one table of tokens for both and the head, biases by distance."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.near = nn.ModuleList(nn.Embedding(2 * LENGTH, HEADS) for _ in range(2))
        self.encoder = nn.ModuleList(
            Block(Attention(causal=False), Gated()) for _ in range(LAYERS - 1)
        )
        self.decoder = nn.ModuleList(
            Block(Attention(), Gated(), Attention(causal=False)) for _ in range(LAYERS - 1)
        )
        self.norms = nn.ModuleList(Norm() for _ in range(2))

    def forward(self, ids: Tensor, said: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1])
        distances = places[:, None] - places + LENGTH
        biases = [table(distances).permute(2, 0, 1) for table in self.near]
        memory = self.embed(ids)
        for block in self.encoder:
            memory = block(memory, bias=biases[0])
        memory, x = self.norms[0](memory), self.embed(said)
        for block in self.decoder:
            x = block(x, memory, biases[1])
        return F.linear(self.norms[1](x) / WIDTH**0.5, self.embed.weight)


def gpt() -> nn.Module:
    """The benchmarks' GPT, its tied table drawn small."""
    model = GPT(LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH)
    nn.init.normal_(model.embed.weight, std=0.3)
    return model


@dataclass(frozen=True)
class Task:
    """A model, and how to make a batch that it learns: arguments of a call, and labels."""

    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, ...]]


def tokens(*shape: int) -> Tensor:
    return torch.randint(VOCABULARY, shape)


def sentences() -> tuple[Tensor, ...]:
    """Each token is followed by the next one in the vocabulary, but the last."""
    ids = (tokens(BATCH, 1) + torch.arange(LENGTH)) % VOCABULARY
    return ids, (ids + 1) % VOCABULARY


def translations() -> tuple[Tensor, ...]:
    ids, labels = sentences()
    return ids, labels, (labels + 1) % VOCABULARY


def images() -> tuple[Tensor, ...]:
    """A bright quarter of a noisy image is its class."""
    labels = torch.arange(BATCH) % CLASSES
    pictures = 0.3 * torch.randn(BATCH, 1, SIDE, SIDE)
    for picture, label in zip(pictures, labels.tolist(), strict=True):
        picture[0].unflatten(0, (2, 4)).unflatten(-1, (2, 4))[label // 2, :, label % 2] += 1
    return pictures, labels


TASKS = {
    "gpt": Task(gpt, sentences),
    "llama": Task(lambda: Decoder(lambda: Block(Attention(2, rotary=True), Gated())), sentences),
    "t5": Task(T5, translations),
    "experts": Task(lambda: Decoder(lambda: Block(Attention(), Experts())), sentences),
    "resnet": Task(lambda: ResNet(8, CLASSES), images),
}
