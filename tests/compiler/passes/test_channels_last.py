"""Channels-last layout: where it goes, where copies stand, and that results are the same."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import shardwright as sw
from shardwright.compiler.passes.channels_last import CONVOLUTIONS, channels_last
from shardwright.compiler.passes.epilogue import fold_norms, fuse_convolutions
from shardwright.compiler.passes.rewriter import same_layout
from shardwright.ir import Builder, IRGraph
from shardwright.ir.tensor_meta import strides_or_none
from shardwright.ir.validate import validate
from tests.compiler.passes.test_fold_norms import evaluated

COPY = "aten.clone.default"


def images(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def laid_out(model: nn.Module, x: torch.Tensor, *, fuse: bool = True) -> IRGraph:
    """The graph after the passes; values, layouts and ends are held against the graph before."""
    before = sw.capture(evaluated(model), (x,))
    graph = fuse_convolutions(fold_norms(before)) if fuse else before
    graph = channels_last(graph)
    validate(graph)
    expected, found = before.run(x), graph.run(x)
    tolerance = 2e-6 if x.dtype == torch.float32 else 1e-9
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()
    for old, new in zip(before.outputs, graph.outputs, strict=True):
        assert same_layout(before.values[old], graph.values[new])
    lies_as_recorded(graph, x)
    return graph


def lies_as_recorded(graph: IRGraph, x: torch.Tensor) -> None:
    """Every value lies in memory as the graph says.

    Not where something convolved has one channel: there torch's fake convolution may take another
    order than its real one, and the executor copies what it is given.
    """
    convolved = [
        graph.values[value_id]
        for node in graph.nodes
        if "conv" in node.op
        for value_id in (*node.inputs[:1], *node.outputs)
    ]
    if any(value.shape[1] == 1 for value in convolved):
        return
    for node in graph.nodes:
        for value_id in node.outputs:
            made = _until(graph, value_id).run(x)
            sized = [i for i, size in enumerate(made.shape) if size > 1]
            recorded = graph.values[value_id].meta.full_strides
            assert [made.stride(i) for i in sized] == [recorded[i] for i in sized], node.op


def _until(graph: IRGraph, value_id: int) -> IRGraph:
    """The graph with one value as its output."""
    builder = Builder()
    mapping = {v: builder.copy_value(graph, graph.values[v]).id for v in graph.inputs}
    mapping |= {value.id: builder.copy_value(graph, value).id for value in graph.stored()}
    for node in graph.nodes:
        builder.copy_node(graph, node, mapping)
        if value_id in node.outputs:
            break
    return builder.finish(mapping[value_id])


def operators(graph: IRGraph) -> Counter[str]:
    return Counter(node.op for node in graph.nodes)


class Block(nn.Module):
    def __init__(self, channels: int, **options: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False, **options)
        self.second = nn.Conv2d(channels, channels, 1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](self.first(x)).relu()
        return (self.norms[1](self.second(y)) + x).relu()


class NextBlock(nn.Module):
    """ConvNeXt's: depthwise, then a norm and linear layers over channels that lie last."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.up, self.down = nn.Linear(channels, 2 * channels), nn.Linear(2 * channels, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.down(nn.functional.gelu(self.up(y)))
        return x + y.permute(0, 3, 1, 2)


class Patches(nn.Module):
    """A vision transformer's beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 16, 4, 4), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.conv(x).flatten(2).transpose(1, 2))


class Squeeze(nn.Module):
    """Channels are weighed by what lies in them (a squeeze and an excitation)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.down, self.up = nn.Conv2d(8, 2, 1), nn.Conv2d(2, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        scale = y.mean((2, 3), keepdim=True)
        return y * self.up(self.down(scale).relu()).sigmoid()


class Odd(nn.Module):
    """Operators that want another order, and views that channels-last memory does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.convs[0](x)
        z = y.view(-1, 4, 5).cumsum(1).view(y.shape) + y.flip(3)
        parts = torch.cat([self.convs[1](z), y, x], 1).chunk(2, 1)
        return torch.softmax(parts[0] + parts[1], 2).transpose(1, 3)


MODELS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "residual blocks": (
        nn.Sequential(nn.Conv2d(3, 8, 7, 2, 3), nn.MaxPool2d(3, 2, 1), Block(8), Block(8)),
        (2, 3, 24, 24),
    ),
    "groups": (nn.Sequential(Block(8, groups=2), Block(8, groups=8)), (1, 8, 6, 6)),
    "one image": (nn.Sequential(Block(8), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(72, 3)),
                  (1, 8, 6, 6)),
    "convnext": (nn.Sequential(nn.Conv2d(3, 8, 4, 4), NextBlock(8), NextBlock(8)), (2, 3, 32, 32)),
    "patches": (Patches(), (2, 3, 16, 16)),
    "squeeze": (Squeeze(), (2, 3, 10, 10)),
    "odd": (Odd(), (2, 8, 4, 5)),
    "head": (
        nn.Sequential(Block(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)),
        (2, 8, 6, 6),
    ),
}  # fmt: skip


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_results_are_the_same(name: str, fuse: bool) -> None:
    model, shape = MODELS[name]
    laid_out(model, images(*shape), fuse=fuse)


COPIES = {"residual blocks": 1, "groups": 2, "one image": 2, "patches": 0, "convnext": 1, "head": 1}
"""One where images of many channels come in, one where an image goes out or is flattened."""


@pytest.mark.parametrize("name", COPIES)
def test_copies_stand_at_borders_only(name: str) -> None:
    model, shape = MODELS[name]
    graph = laid_out(model, images(*shape))
    clones = [node for node in graph.nodes if node.op == COPY]
    flattened = [node for node in graph.nodes if node.op.startswith(("aten.flatten", "aten.resh"))]
    copies = len(clones) + sum(
        strides_or_none((v := graph.values[node.inputs[0]]).shape, v.strides) is not None
        and graph.values[node.outputs[0]].strides is None
        for node in flattened
    )
    assert copies <= COPIES[name]
    for node in graph.nodes:
        if node.op in CONVOLUTIONS:
            made = graph.values[node.outputs[0]]
            assert made.meta.full_strides[1] == 1


def test_every_convolution_but_the_first_reads_channels_last() -> None:
    graph = laid_out(*_case("residual blocks"))
    for node in [node for node in graph.nodes if node.op in CONVOLUTIONS][1:]:
        assert graph.values[node.inputs[0]].meta.full_strides[1] == 1


def _case(name: str) -> tuple[nn.Module, torch.Tensor]:
    model, shape = MODELS[name]
    return model, images(*shape)


def test_an_input_that_lies_so_is_not_copied() -> None:
    x = images(2, 8, 6, 6).contiguous(memory_format=torch.channels_last)
    graph = laid_out(nn.Sequential(Block(8), Block(8)), x)
    assert COPY not in operators(graph)


@st.composite
def networks(draw: st.DrawFn) -> tuple[nn.Module, torch.Tensor]:
    """Sequences of layers, each on what the one before makes."""
    torch.manual_seed(draw(st.integers(0, 99)))
    channels = draw(st.sampled_from([1, 3, 8]))
    x = images(draw(st.integers(1, 2)), channels, *draw(st.tuples(*[st.integers(5, 9)] * 2)))
    layers: list[nn.Module] = []
    for kind in draw(
        st.lists(st.sampled_from(["conv", "wide", "norm", "relu", "group", "pool"]), max_size=6)
    ):
        if kind in ("conv", "wide"):
            outputs = draw(st.sampled_from([1, 4, 8]))
            size = 1 if kind == "wide" else 3
            layers.append(nn.Conv2d(channels, outputs, size, padding=size // 2))
            channels = outputs
        elif kind == "norm":
            layers.append(nn.BatchNorm2d(channels))
        elif kind == "group":
            layers.append(nn.GroupNorm(1, channels))
        else:
            layers.append(nn.ReLU() if kind == "relu" else nn.MaxPool2d(3, 1, 1))
    # in f64, since norms of nearly equal numbers magnify what rounding makes of them
    return nn.Sequential(*layers, nn.ReLU()).double(), x.double()


@settings(max_examples=25, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(networks())
def test_any_sequence_of_layers(case: tuple[nn.Module, torch.Tensor]) -> None:
    laid_out(*case)


def test_graphs_without_convolutions_stay() -> None:
    graph = sw.capture(nn.Linear(4, 4), (images(2, 4),))
    assert channels_last(graph) is graph


def test_steps_of_training_stay() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    graph = sw.compile_ir(step, images(2, 3, 6, 6))
    assert channels_last(graph) is graph


class Behind(nn.Module):
    """A convolution, and what reads it otherwise than as images."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.conv, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16)
        self.one = nn.Conv1d(16, 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        match self.name:
            case "flattened":
                return self.norm(x.flatten(2))
            case "flattened, convolved":
                return self.one(nn.functional.silu(self.norm(x.flatten(2))))
            case "attention block":
                rows = self.norm(x.flatten(2)).transpose(1, 2)
                mixed = nn.functional.scaled_dot_product_attention(rows, rows, rows)
                return mixed.transpose(1, 2).reshape(x.shape) + x
            case "transposed":
                return self.norm(x.transpose(2, 3))
            case "sliced":
                return self.norm(x[:, :, ::2])
            case "some channels":
                return nn.functional.group_norm(x[:, :8], 4)
            case "five dimensions":
                return self.norm(x.unsqueeze(2))
            case _:
                return self.norm(x)


BEHIND = [
    *("flattened", "flattened, convolved", "attention block", "transposed", "sliced"),
    *("some channels", "five dimensions", "as it is"),
]


@pytest.mark.parametrize("name", BEHIND)
def test_a_group_norm_reads_what_its_kernel_takes(name: str) -> None:
    torch.manual_seed(0)
    model, x = Behind(name).eval(), images(2, 3, 8, 8)
    with torch.no_grad():
        expected = model(x)
    found = sw.compile(model, x)(x)
    assert found.stride() == expected.stride()
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
