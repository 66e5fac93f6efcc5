"""Small models for small images of one channel: a vision transformer and a residual network."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models import Block

SIDE = 8
"""Pixels along each side of an image."""


class ViT(nn.Module):
    """A vision transformer: patches of two by two pixels are its tokens."""

    def __init__(self, layers: int, width: int, heads: int, classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, 2)
        self.position = nn.Parameter(torch.randn((SIDE // 2) ** 2, width))
        self.blocks = nn.ModuleList(
            Block(width, heads, fused=False, causal=False) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class Residual(nn.Module):
    """Two convolutions with batch norms beside a shortcut."""

    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        given = channels // stride
        self.conv1 = nn.Conv2d(given, channels, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.shortcut = nn.Conv2d(given, channels, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    """A stem, three residual blocks, and a linear layer of the mean over the image."""

    def __init__(self, width: int, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.blocks = nn.Sequential(
            Residual(width, 1), Residual(2 * width, 2), Residual(4 * width, 2)
        )
        self.head = nn.Linear(4 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))
