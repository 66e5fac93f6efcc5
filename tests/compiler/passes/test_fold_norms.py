"""Folding batch norms: what is folded, what is not, and that results are the same."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.compiler.passes.epilogue import fold_norms
from shardwright.ir import IRGraph
from shardwright.ir.validate import validate

NORM = "aten.batch_norm.default"


def evaluated(model: nn.Module) -> nn.Module:
    """The model in evaluation, its norms with statistics and weights of their own."""
    generator = torch.Generator().manual_seed(3)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            for name in ("weight", "bias", "running_mean", "running_var"):
                if (tensor := getattr(module, name)) is not None:
                    numbers = torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype)
                    tensor.data.copy_(numbers + 0.5)
    return model.eval().requires_grad_(False)


def folded(model: nn.Module, *inputs: torch.Tensor) -> tuple[IRGraph, IRGraph]:
    """The graph before and after; the results are compared."""
    before = sw.capture(evaluated(model), inputs)
    after = fold_norms(before)
    validate(after)
    expected, found = before.run(*inputs), after.run(*inputs)
    tolerance = 1e-6 if expected.dtype == torch.float32 else 1e-13
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()
    return before, after


def operators(graph: IRGraph) -> Counter[str]:
    return Counter(node.op for node in graph.nodes)


class Tied(nn.Module):
    """One convolution at two places, each with a norm of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(4), nn.BatchNorm2d(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norms[1](self.conv(self.norms[0](self.conv(x)).relu()))


IMAGES = torch.randn(2, 4, 9, 9, generator=torch.Generator().manual_seed(0))
MODELS: dict[str, tuple[nn.Module, torch.Tensor]] = {
    "bias": (nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)), IMAGES),
    "no bias": (nn.Sequential(nn.Conv2d(4, 6, 3, bias=False), nn.BatchNorm2d(6)), IMAGES),
    "groups": (nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.BatchNorm2d(8)), IMAGES),
    "depthwise": (nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.BatchNorm2d(4)), IMAGES),
    "dilated": (nn.Sequential(nn.Conv2d(4, 5, 3, 2, 1, 2), nn.BatchNorm2d(5)), IMAGES),
    "same": (nn.Sequential(nn.Conv2d(4, 5, 3, padding="same"), nn.BatchNorm2d(5)), IMAGES),
    "plain norm": (nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6, affine=False)), IMAGES),
    "one dimension": (nn.Sequential(nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6)), IMAGES[:, :, 0]),
    "linear": (nn.Sequential(nn.Linear(9, 6), nn.BatchNorm1d(6)), IMAGES[0, 0]),
    "f64": (nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)).double(), IMAGES.double()),
    "tied": (Tied(), IMAGES),
}


@pytest.mark.parametrize("name", MODELS)
def test_norms_are_folded(name: str) -> None:
    before, after = folded(*MODELS[name])
    assert operators(before)[NORM] > 0
    assert operators(after) == operators(before) - Counter({NORM: operators(before)[NORM]})


class Fork(nn.Module):
    """What the convolution makes is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        return self.norm(y) + y


KEPT: dict[str, tuple[nn.Module, torch.Tensor]] = {
    "read twice": (Fork(), IMAGES),
    "no layer before": (nn.Sequential(nn.ReLU(), nn.BatchNorm2d(4)), IMAGES),
    "batch statistics": (
        nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, track_running_stats=False)),
        IMAGES,
    ),
    "transposed": (nn.Sequential(nn.ConvTranspose2d(4, 6, 3), nn.BatchNorm2d(6)), IMAGES),
    # of [n, c, l] a norm takes c for channels, a linear layer l
    "linear of rows": (nn.Sequential(nn.Linear(9, 4), nn.BatchNorm1d(4)), IMAGES[:, :, 0]),
}


@pytest.mark.parametrize("name", KEPT)
def test_norms_are_kept(name: str) -> None:
    before, after = folded(*KEPT[name])
    assert after is before


def test_weights_without_contents_are_not_folded() -> None:
    with sw.empty_weights():
        model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)).eval()
    graph = sw.capture(model, (IMAGES,))
    assert fold_norms(graph) is graph


def test_a_norm_in_training_is_not_folded() -> None:
    model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)).train()
    graph = sw.capture(model, (IMAGES,))
    assert fold_norms(graph) is graph


def test_the_source_and_its_weights_stay_as_they_are() -> None:
    model = evaluated(nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    graph = sw.capture(model, (IMAGES,))
    text = str(graph)
    fold_norms(graph)
    assert str(graph) == text
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
