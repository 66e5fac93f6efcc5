"""Small models of the kinds that are trained, each with a batch and a loss; float64."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 40


class Gpt(nn.Module):
    """Pre-norm blocks with fused projections; the output layer is tied to the embedding."""

    def __init__(self, layers: int = 2, width: int = 16, heads: int = 4, length: int = 6) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(GptBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class GptBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).split(width, -1)
        query, key, value = (
            part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts
        )
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Llama(nn.Module):
    """Rotary places, grouped queries, gated layers, root-mean-square norms; nothing is tied."""

    def __init__(self, layers: int = 2, width: int = 16, heads: int = 4, length: int = 6) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        angles = torch.outer(torch.arange(length), 0.1 ** torch.arange(width // heads // 2))
        self.register_buffer("angles", torch.cat([angles, angles], -1).double())

    def forward(self, tokens: Tensor) -> Tensor:
        x, angles = self.tokens(tokens), self.angles[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, angles.cos(), angles.sin())
        return self.head(self.norm(x))


class LlamaBlock(nn.Module):
    def __init__(self, width: int, heads: int, groups: int = 2) -> None:
        super().__init__()
        self.heads, self.groups, each = heads, groups, width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, groups * each, bias=False)
        self.value = nn.Linear(width, groups * each, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        y = self.norm1(x)
        query = self.query(y).view(batch, length, self.heads, -1).transpose(1, 2)
        key = self.key(y).view(batch, length, self.groups, -1).transpose(1, 2)
        value = self.value(y).view(batch, length, self.groups, -1).transpose(1, 2)
        query, key = turned(query, cos, sin), turned(key, cos, sin)
        each = self.heads // self.groups
        key, value = key.repeat_interleave(each, 1), value.repeat_interleave(each, 1)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class Translator(nn.Module):
    """An encoder that every layer of a decoder looks at; one embedding for both."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.encoder = nn.ModuleList(GptBlock(width, heads) for _ in range(2))
        self.decoder = nn.ModuleList(GptBlock(width, heads) for _ in range(2))
        self.cross = nn.ModuleList(Cross(width, heads) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        seen = self.tokens(tokens.flip(1))
        for block in self.encoder:
            seen = block(seen)
        x = self.tokens(tokens)
        for block, cross in zip(self.decoder, self.cross, strict=True):
            x = cross(block(x), seen)
        return self.head(x)


class Cross(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in (self.query(x), self.key(seen), self.value(seen))
        )
        y = F.scaled_dot_product_attention(query, key, value)
        return x + self.out(y.transpose(1, 2).reshape(batch, length, width))


class Experts(nn.Module):
    """A mixture: each token goes through its two best experts, weighed by its router."""

    def __init__(self, width: int = 16, experts: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) / 4)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) / 4)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        chances = self.router(x).softmax(-1)
        best, chosen = chances.topk(2, -1)
        weights = torch.zeros_like(chances).scatter(-1, chosen, best / best.sum(-1, keepdim=True))
        y = F.gelu(torch.einsum("btw,ewh->bteh", x, self.up))
        y = torch.einsum("bteh,ehw->btew", y, self.down)
        return self.head(self.norm(x + (y * weights[..., None]).sum(-2)))


class ResNet(nn.Module):
    """Convolutions with batch norm in training, and residuals."""

    def __init__(self, channels: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.blocks = nn.ModuleList(ResBlock(channels) for _ in range(2))
        self.head = nn.Linear(channels, VOCABULARY)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(images)))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class ResBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (
            nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2)
        )
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(y)))


MODELS: dict[str, type[nn.Module]] = {
    "gpt": Gpt,
    "llama": Llama,
    "translator": Translator,
    "experts": Experts,
    "resnet": ResNet,
}


def made(name: str) -> nn.Module:
    """A model with the same parameters at each call."""
    torch.manual_seed(0)
    return MODELS[name]().double()


def batch_of(name: str, rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and labels; of a text some labels do not count."""
    generator = torch.Generator().manual_seed(seed)
    if name == "resnet":
        images = torch.randn(rows, 3, 5, 5, generator=generator, dtype=torch.float64)
        return images, torch.randint(VOCABULARY, (rows,), generator=generator)
    tokens, labels = torch.randint(VOCABULARY, (2, rows, 6), generator=generator)
    labels[: rows // 2, 3:] = -100
    return tokens, labels


def loss_of(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """The mean over the labels that count."""
    scores = model(inputs)
    return F.cross_entropy(scores.flatten(0, -2), labels.flatten())
