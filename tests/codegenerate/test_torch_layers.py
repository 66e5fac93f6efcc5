"""find_layer: a layer of torch.nn is found by its nodes, and gives the very nodes again."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from shardwright.codegenerate.spelling.forms import words
from shardwright.codegenerate.writing.layers import TorchLayer, find_layer
from shardwright.ir import IRGraph, IRNode
from shardwright.tracing import capture
from tests.codegenerate.spelling_samples import Spec, f, i


class Around(nn.Module):
    """A model whose nodes are those of one layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.layer(*tensors)


IMAGE, VOLUME, SIGNAL = f(2, 4, 8, 8), f(2, 4, 4, 4, 4), f(2, 4, 8)
ROWS = f(3, 4)

WITH_PARAMETERS: list[tuple[str, tuple[Spec, ...]]] = [
    ("nn.Linear(4, 6)", (ROWS,)),
    ("nn.Linear(4, 6, bias=False)", (f(2, 3, 4),)),
    ("nn.Linear(4, 6, dtype=torch.float64)", (f(3, 4, dtype="f64"),)),
    ("nn.Linear(4, 6, dtype=torch.bfloat16)", (f(3, 4, dtype="bf16"),)),
    ("nn.Bilinear(4, 5, 6)", (ROWS, f(3, 5))),
    ("nn.Bilinear(4, 5, 6, bias=False)", (ROWS, f(3, 5))),
    ("nn.Embedding(7, 4)", (i(3, below=7),)),
    ("nn.Embedding(7, 4, padding_idx=1)", (i(2, 3, below=7),)),
    ("nn.Embedding(7, 4, dtype=torch.bfloat16)", (i(3, below=7),)),
    ("nn.Conv1d(4, 6, kernel_size=3)", (SIGNAL,)),
    ("nn.Conv1d(4, 4, kernel_size=4, padding=3, groups=4)", (SIGNAL,)),
    ("nn.Conv2d(4, 6, kernel_size=7, stride=2, padding=3, bias=False)", (IMAGE,)),
    ("nn.Conv2d(4, 6, kernel_size=(3, 1), stride=(2, 1), padding=(1, 0))", (IMAGE,)),
    ("nn.Conv2d(4, 8, kernel_size=3, dilation=2, groups=2)", (f(4, 8, 8),)),
    ('nn.Conv2d(4, 6, kernel_size=3, padding="same")', (IMAGE,)),
    ("nn.Conv3d(4, 6, kernel_size=3)", (VOLUME,)),
    ("nn.ConvTranspose1d(4, 6, kernel_size=3, stride=2)", (SIGNAL,)),
    ("nn.ConvTranspose2d(4, 6, kernel_size=4, stride=2, padding=1, bias=False)", (IMAGE,)),
    ("nn.ConvTranspose2d(4, 6, kernel_size=3, stride=2, output_padding=1, groups=2)", (IMAGE,)),
    ("nn.ConvTranspose3d(4, 6, kernel_size=3)", (VOLUME,)),
    ("nn.LayerNorm(4)", (ROWS,)),
    ("nn.LayerNorm(4, eps=1e-06)", (ROWS,)),
    ("nn.LayerNorm((3, 4))", (f(2, 3, 4),)),
    ("nn.LayerNorm(4, bias=False)", (ROWS,)),
    ("nn.RMSNorm(4)", (ROWS,)),
    ("nn.RMSNorm(4, eps=1e-06)", (ROWS,)),
    ("nn.GroupNorm(2, 4)", (IMAGE,)),
    ("nn.GroupNorm(2, 4, eps=1e-06)", (SIGNAL,)),
    ("nn.BatchNorm1d(4)", (ROWS,)),
    ("nn.BatchNorm1d(4)", (SIGNAL,)),
    ("nn.BatchNorm2d(4)", (IMAGE,)),
    ("nn.BatchNorm2d(4, eps=0.001, momentum=0.01)", (IMAGE,)),
    ("nn.BatchNorm2d(4, momentum=0.0)", (IMAGE,)),
    ("nn.BatchNorm2d(4, affine=False)", (IMAGE,)),
    ("nn.BatchNorm2d(4, bias=False)", (IMAGE,)),
    ("nn.BatchNorm2d(4, track_running_stats=False)", (IMAGE,)),
    ("nn.BatchNorm2d(4, dtype=torch.float64)", (f(2, 4, 3, 3, dtype="f64"),)),
    ("nn.BatchNorm3d(4)", (VOLUME,)),
    ("nn.InstanceNorm1d(4, affine=True)", (SIGNAL,)),
    ("nn.InstanceNorm2d(4, affine=True, bias=False)", (IMAGE,)),
    ("nn.InstanceNorm3d(4, affine=True)", (VOLUME,)),
    ("nn.PReLU(1)", (ROWS,)),
    ("nn.PReLU(4)", (IMAGE,)),
]
if torch.__version__ < "2.13":  # these norms had no `bias`
    WITH_PARAMETERS = [
        sample for sample in WITH_PARAMETERS if not re.search(r"(Batch|Instance).*bias", sample[0])
    ]

PLAIN: list[tuple[str, tuple[Spec, ...]]] = [
    ("nn.LayerNorm(4, elementwise_affine=False)", (ROWS,)),
    ("nn.RMSNorm(4, elementwise_affine=False)", (ROWS,)),
    ("nn.GroupNorm(2, 4, affine=False)", (IMAGE,)),
    ("nn.InstanceNorm2d(4)", (IMAGE,)),
    *(
        (f"nn.{name}()", (f(3, 4),))
        for name in words("""
            ReLU ReLU6 GELU SiLU Mish Tanh Sigmoid LogSigmoid Hardswish Hardsigmoid SELU ELU CELU 
            LeakyReLU Hardtanh Softplus Hardshrink Softshrink GLU Flatten
        """)
    ),
    ('nn.GELU(approximate="tanh")', (ROWS,)),
    ("nn.LeakyReLU(negative_slope=0.2)", (ROWS,)),
    ("nn.ELU(alpha=0.5)", (ROWS,)),
    ("nn.Hardtanh(min_val=0.0)", (ROWS,)),
    ("nn.Softplus(beta=2.0)", (ROWS,)),
    ("nn.Threshold(0.5, 0.0)", (ROWS,)),
    ("nn.Softmax(dim=-1)", (ROWS,)),
    ("nn.LogSoftmax(dim=1)", (ROWS,)),
    ("nn.GLU(dim=0)", (f(4, 3),)),
    ("nn.Flatten(start_dim=0)", (IMAGE,)),
    ("nn.Unflatten(1, (2, 2))", (ROWS,)),
    ("nn.PixelShuffle(2)", (IMAGE,)),
    ("nn.PixelUnshuffle(2)", (IMAGE,)),
    ("nn.ChannelShuffle(2)", (IMAGE,)),
    ("nn.CosineSimilarity()", (ROWS, ROWS)),
    ("nn.CosineSimilarity(dim=0)", (ROWS, ROWS)),
    ("nn.MaxPool1d(2)", (SIGNAL,)),
    ("nn.MaxPool2d(3, stride=2, padding=1)", (IMAGE,)),
    ("nn.MaxPool2d((2, 1))", (IMAGE,)),
    ("nn.MaxPool3d(2)", (VOLUME,)),
    ("nn.AvgPool1d(2)", (SIGNAL,)),
    ("nn.AvgPool2d(2, count_include_pad=False)", (IMAGE,)),
    ("nn.AvgPool3d(2)", (VOLUME,)),
    ("nn.AdaptiveAvgPool1d(1)", (SIGNAL,)),
    ("nn.AdaptiveAvgPool2d(1)", (IMAGE,)),
    ("nn.AdaptiveAvgPool2d((2, 4))", (IMAGE,)),
    ("nn.AdaptiveAvgPool3d(2)", (VOLUME,)),
    ("nn.ZeroPad2d(1)", (IMAGE,)),
    ("nn.ConstantPad1d((1, 0), 0.5)", (SIGNAL,)),
    ("nn.ReflectionPad2d(1)", (IMAGE,)),
    ("nn.ReplicationPad2d((1, 0, 1, 0))", (IMAGE,)),
    ("nn.CircularPad1d(1)", (SIGNAL,)),
    ("nn.CrossEntropyLoss()", (f(3, 4), i(3, below=4))),
    ('nn.CrossEntropyLoss(ignore_index=0, reduction="sum")', (f(3, 4), i(3, below=4))),
    ("nn.NLLLoss()", (f(3, 4), i(3, below=4))),
    ("nn.BCEWithLogitsLoss()", (ROWS, ROWS)),
    ('nn.KLDivLoss(reduction="sum")', (ROWS, ROWS)),
]

RANDOM: list[tuple[str, tuple[Spec, ...]]] = [
    ("nn.Dropout(0.1)", (ROWS,)),
    ("nn.Dropout1d(0.1)", (SIGNAL,)),
    ("nn.Dropout2d(0.5)", (IMAGE,)),
    ("nn.Dropout3d(0.5)", (VOLUME,)),
    ("nn.AlphaDropout(0.1)", (ROWS,)),
    ("nn.FeatureAlphaDropout(0.1)", (ROWS,)),
]


def captured(text: str, specs: tuple[Spec, ...], training: bool) -> IRGraph:
    torch.manual_seed(0)
    model = Around(eval(text)).train(training)
    return capture(model, [spec.make() for spec in specs])


def found(graph: IRGraph, nodes: list[IRNode] | None = None) -> TorchLayer | None:
    scopes = {scope for node in graph.nodes for scope in node.scopes}
    scope = next(scope for scope in scopes if scope.path == "layer")
    nodes = graph.nodes if nodes is None else nodes
    return find_layer(graph, nodes, scope, training=bool(graph.training))


def check(layer: TorchLayer | None, text: str, graph: IRGraph) -> None:
    assert layer is not None
    assert layer.constructor == text
    assert [graph.values[i].role for i in layer.arguments] == ["input"] * len(graph.inputs)
    assert layer.arguments == tuple(graph.inputs)
    assert layer.results == tuple(graph.outputs)
    stored = {f"layer.{name}": value_id for name, value_id in layer.parameters.items()}
    assert stored == {value.names[0]: value.id for value in graph.stored()}


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize(("text", "specs"), [*WITH_PARAMETERS, *PLAIN], ids=str)
def test_layers(text: str, specs: tuple[Spec, ...], training: bool) -> None:
    graph = captured(text, specs, training)
    check(found(graph), text, graph)


@pytest.mark.parametrize(("text", "specs"), RANDOM, ids=str)
def test_dropout_layers(text: str, specs: tuple[Spec, ...]) -> None:
    graph = captured(text, specs, training=True)
    check(found(graph), text, graph)


def test_the_text_makes_the_very_nodes() -> None:
    """What was not said as the layer's text says it is said by the text all the same."""
    graph = captured("nn.Conv2d(4, 6, 3, 1, 1, 1, 1, True)", (IMAGE,), training=False)
    layer = found(graph)
    assert layer is not None
    assert layer.constructor == "nn.Conv2d(4, 6, kernel_size=3, padding=1)"
    assert captured(layer.constructor, (IMAGE,), training=False) == graph


def test_a_stranger_class_is_no_layer() -> None:
    class Linear(nn.Linear):
        pass

    graph = capture(Around(Linear(4, 4)), [ROWS.make()])
    assert found(graph) is None


def test_a_layer_with_a_forward_of_its_own_is_no_layer() -> None:
    model = Around(nn.Linear(4, 4))
    model.layer.forward = lambda x: nn.functional.linear(x, model.layer.weight)
    assert found(capture(model, [ROWS.make()])) is None


def test_a_weight_of_another_module_is_no_layer() -> None:
    graph = captured("nn.Linear(4, 6)", (ROWS,), training=False)
    for value in graph.stored():
        value.names = (value.names[0].replace("layer", "other"),)
    assert found(graph) is None


def test_a_tied_weight_is_found_by_its_second_name() -> None:
    graph = captured("nn.Linear(4, 6, bias=False)", (ROWS,), training=False)
    (weight,) = graph.stored()
    weight.names = ("wte.weight", "layer.weight")
    layer = found(graph)
    assert layer is not None
    assert layer.parameters == {"weight": weight.id}


def test_parameters_of_two_dtypes_are_no_layer() -> None:
    graph = captured("nn.LayerNorm(4)", (ROWS,), training=False)
    weight = next(graph.stored())
    weight.meta = replace(weight.meta, dtype="f64")
    assert found(graph) is None


def test_a_layer_called_twice_is_found_call_by_call() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(self.layer(x))

    graph = capture(Twice(), [ROWS.make()])
    assert found(graph) is None
    first, second = (found(graph, [node]) for node in graph.nodes)
    assert first is not None
    assert second is not None
    assert replace(second, arguments=first.arguments, results=first.results) == first


def test_a_norm_whose_new_statistics_are_read_is_no_layer() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.BatchNorm1d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x)
            return y + self.layer.running_mean

    graph = capture(Reads().train(), [ROWS.make()])
    nodes = [node for node in graph.nodes if node.scope == "layer"]
    assert found(graph, nodes) is None


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("text", ["nn.BatchNorm2d(4)", "nn.Dropout(0.5)"])
def test_a_layer_in_another_mode_than_the_model_is_no_layer(text: str, training: bool) -> None:
    layer = eval(text).train(not training)
    model = Around(layer)
    model.training = training
    graph = capture(model, [IMAGE.make()])
    assert graph.training == training
    assert not graph.nodes or found(graph) is None
