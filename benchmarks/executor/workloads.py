"""What the executor is measured on: small and large, training steps and forwards.

The same contents every time, so that any variant of a workload gives what any other does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models import GPT, loss_of

VOCABULARY = 1000
RATE = 1e-3


class Task(NamedTuple):
    """A model, the arguments of a call, and, where it is trained, the loss of a batch."""

    model: nn.Module
    batch: tuple[Tensor, ...]
    loss: Callable[..., Tensor] | None = None


@dataclass(frozen=True)
class Workload:
    """``steps`` is about how many go in a tenth of a second; optimizer None: a forward."""

    title: str
    make: Callable[[], Task]
    threads: tuple[int, ...]
    steps: int
    optimizer: type[torch.optim.Optimizer] | None = None


def mlp(width: int, layers: int, batch: int) -> Task:
    torch.manual_seed(0)
    parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*parts[:-1])
    x, y = torch.randn(2, batch, width)
    return Task(model, (x, y), lambda x, y: F.mse_loss(model(x), y))


def trained_gpt(layers: int, width: int, heads: int, length: int, batch: int) -> Task:
    torch.manual_seed(0)
    model = GPT(layers, width, heads, VOCABULARY, length, tied=False)
    ids, labels = torch.randint(VOCABULARY, (2, batch, length))
    return Task(model, (ids, labels), lambda ids, labels: loss_of(model(ids), labels))


def gpt_forward(batch: int, length: int) -> Task:
    torch.manual_seed(0)
    model = GPT(4, 384, 6, VOCABULARY, length, tied=False).eval()
    return Task(model, (torch.randint(VOCABULARY, (batch, length)),))


class Bert(nn.Module):
    """Token embeddings, an encoder of torch's own layers (normalized last, GELU), a pooler."""

    def __init__(self, layers: int, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(length, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(BertLayer(width, heads) for _ in range(layers))
        self.pool = nn.Linear(width, width)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm(self.embed(ids) + self.position.weight)
        for layer in self.layers:
            x = layer(x)
        return x, torch.tanh(self.pool(x[:, 0]))


class BertLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        x = self.norm1(x + self.out(y))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


def bert_forward(batch: int, length: int) -> Task:
    torch.manual_seed(0)
    model = Bert(6, 384, 6, length).eval()
    return Task(model, (torch.randint(VOCABULARY, (batch, length)),))


class Residual(nn.Module):
    """Two convolutions with batch norms, and the way past them."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        self.past = None
        if stride > 1 or channels != out:
            conv = nn.Conv2d(channels, out, 1, stride, bias=False)
            self.past = nn.Sequential(conv, nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        past = x if self.past is None else self.past(x)
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + past)


def resnet_forward(batch: int, side: int) -> Task:
    """ResNet-18 with statistics as if it had been trained."""
    torch.manual_seed(0)
    sizes = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
    blocks = [
        block
        for channels, out, stride in sizes
        for block in (Residual(channels, out, stride), Residual(out, out, 1))
    ]
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000)]
    model = nn.Sequential(*stem, nn.MaxPool2d(3, 2, 1), *blocks, *head)
    x = torch.randn(batch, 3, side, side)
    with torch.no_grad():
        model(x)
    return Task(model.eval(), (x,))


ADAM, ADAMW = torch.optim.Adam, torch.optim.AdamW
WORKLOADS: Mapping[str, Workload] = {
    "mlp-small": Workload("MLP 3x128, batch 64, train", lambda: mlp(128, 3, 64), (1,), 100, ADAM),
    "gpt-small": Workload(
        "GPT 2x128, length 64, batch 4, train",
        lambda: trained_gpt(2, 128, 4, 64, 4),
        (1, 2),
        10,
        ADAMW,
    ),
    "mlp-large": Workload(
        "MLP 4x1024, batch 256, train", lambda: mlp(1024, 4, 256), (1, 2), 2, ADAMW
    ),
    "gpt-large": Workload(
        "GPT 4x384, length 128, batch 8, train",
        lambda: trained_gpt(4, 384, 6, 128, 8),
        (2,),
        1,
        ADAMW,
    ),
    "gpt-1": Workload("GPT 4x384, batch 1, length 32", lambda: gpt_forward(1, 32), (1, 2), 20),
    "bert-1": Workload("BERT 6x384, batch 1, length 32", lambda: bert_forward(1, 32), (1, 2), 20),
    "gpt-32": Workload("GPT 4x384, batch 32, length 128", lambda: gpt_forward(32, 128), (2,), 1),
    "bert-32": Workload("BERT 6x384, batch 32, length 128", lambda: bert_forward(32, 128), (2,), 1),
    "resnet": Workload("ResNet-18, 2 images of 128", lambda: resnet_forward(2, 128), (1, 2), 4),
}
