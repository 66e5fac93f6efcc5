"""All passes together, on models and training steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.compiler.passes.pipeline import prepare
from shardwright.compiler.sources import whole_step
from shardwright.ir import IRGraph
from shardwright.tracing import capture_step
from tests.compiler.passes.rewritten import operators, programs, rewritten

WIDTH, HEADS, LENGTH, WORDS = 16, 2, 6, 11


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        parts = self.qkv(self.norms[0](x)).view(b, t, 3, HEADS, d // HEADS).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, d))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    """A small language model."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.words(x) + self.places(torch.arange(x.shape[1]))
        return self.head(self.norm(self.blocks(x)))


def step_graph(layers: int = 2, optimizer: Any = torch.optim.AdamW) -> IRGraph:
    model = GPT(layers)
    optimizer = optimizer(model.parameters(), lr=1e-3)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        return loss

    return whole_step(capture_step(step, (WORDS_IN, WORDS_IN), {}))


WORDS_IN = torch.arange(2 * LENGTH).reshape(2, LENGTH) % WORDS
RATE = torch.tensor(1e-3, dtype=torch.float64)


def train(graph: IRGraph) -> IRGraph:
    return prepare(graph, inference=False)


def infer(graph: IRGraph) -> IRGraph:
    return prepare(graph, inference=True)


def test_a_training_step_renews_what_it_did() -> None:
    graph = step_graph()
    after = rewritten(graph, train, [WORDS_IN, WORDS_IN, RATE], tolerance=1e-6)
    found = set(operators(after))
    assert not found & {"linear", "mm", "t", "_log_softmax", "clone", "stack", "gelu", "ne", "div"}
    assert operators(after).count("cross_entropy") == 1
    found = programs(after)
    assert [text for text in found if "gelu" in text] == (
        ["gelu x0 -> %0"] * 2 + ["gelu_bwd x0 x1 -> %0"] * 2
    )
    assert len(found) == 7, "labels are counted, and the loss and its gradient divided"
    assert len(after.updates) == len(graph.updates)


def test_a_forward_is_products_norms_and_attention() -> None:
    graph = sw.capture(GPT().eval(), (WORDS_IN,))
    after = rewritten(graph, infer, [WORDS_IN], tolerance=1e-6)
    layer = [
        "native_layer_norm",
        "gemm",
        "view",
        "permute",
        "unbind",
        "_scaled_dot_product_flash_attention_for_cpu",
        "transpose",
        "view",
        "gemm",
        "native_layer_norm",
        "gemm",
        "gemm",
    ]
    ends = ["native_layer_norm", "gemm"]
    assert operators(after) == ["embedding", "add", *layer, *layer, *ends]


def test_nothing_new_is_stored_where_a_file_says_what_is() -> None:
    graph = sw.capture(GPT().eval(), (WORDS_IN,))

    def lowered(graph: IRGraph) -> IRGraph:
        return prepare(graph, inference=True, constants=False)

    after = rewritten(graph, lowered, [WORDS_IN], tolerance=1e-6)
    stored = {value.name for value in graph.stored()}
    assert {value.name for value in after.stored()} == stored


def test_passes_are_linear_in_depth() -> None:
    counts = [len(train(step_graph(layers)).nodes) for layers in (1, 2, 4)]
    assert counts[2] - counts[1] == 2 * (counts[1] - counts[0])


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(8 * 16, 5),
        ),
        (2, 3, 8, 8),
    ),
    "recurrence": (lambda: nn.LSTM(4, 8, batch_first=True), (2, 3, 4)),
    "transformer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (2, 5, 8)),
    "activations": (
        lambda: nn.Sequential(
            nn.Linear(4, 4),
            nn.ELU(),
            nn.Softplus(),
            nn.Hardswish(),
            nn.Mish(),
            nn.GLU(),
            nn.ReLU6(),
        ),
        (3, 4),
    ),
}


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, inference: bool) -> None:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    x = torch.randn(shape)
    graph = sw.capture(make().eval(), (x,))
    rewritten(graph, infer if inference else train, [x], tolerance=1e-5)
