"""The law of spelling: what a call is written as is captured as that very call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwright.codegenerate.spelling.table import ROWS
from shardwright.ir import IRGraph, compile_graph
from shardwright.ir.structure import Leaf
from shardwright.tracing import capture
from tests.codegenerate.checkers import assert_passes_mypy
from tests.codegenerate.spelling_samples import Sample, class_text, run_class
from tests.codegenerate.spelling_table import SAMPLES

MODES = (False, True)


def by_mode(training: bool) -> list[Sample]:
    return [sample for sample in SAMPLES if sample.training == training and sample.captured]


def written(samples: list[Sample], name: str = "Samples") -> str:
    """A class with a method a sample."""
    return class_text(name, [(sample.spelled(), *counts(sample.graph()[0])) for sample in samples])


def counts(graph: IRGraph) -> tuple[int, bool]:
    """How many tensors a sample takes, and whether it gives one rather than a tuple."""
    return len(graph.inputs), isinstance(graph.out_structure, Leaf)


class Every(nn.Module):
    """Calls every sample's method with its own tensors."""

    def __init__(self, samples: list[Sample]) -> None:
        super().__init__()
        self.samples = samples
        self.calls = run_class("Samples", written(samples))()

    def forward(self, *tensors: torch.Tensor) -> list[Any]:
        given = iter(tensors)
        return [
            getattr(self.calls, f"call_{k}")(*(next(given) for _ in sample.specs()))
            for k, sample in enumerate(self.samples)
        ]


@pytest.fixture(scope="module")
def found() -> dict[str, tuple[IRGraph, int]]:
    """What each sample was captured as: the graph of all, and the place of its first output."""
    places: dict[str, tuple[IRGraph, int]] = {}
    for training in MODES:
        samples = by_mode(training)
        model = Every(samples).train(training)
        tensors = [spec.make() for sample in samples for spec in sample.specs()]
        graph = capture(model, tensors)
        place = 0
        for sample in samples:
            places[str(sample)] = graph, place
            place += len(sample.graph()[1].outputs)
        assert place == len(graph.outputs)
    return places


def without_settings(attrs: dict[str, Any]) -> dict[str, Any]:
    """What the text says; torch's own settings are read from torch."""
    return {name: value for name, value in attrs.items() if not name.startswith("cudnn_enable")}


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_text(sample: Sample) -> None:
    assert sample.spelled().text == sample.text


@pytest.mark.parametrize("sample", [s for s in SAMPLES if s.captured], ids=str)
def test_captures_back(sample: Sample, found: dict[str, tuple[IRGraph, int]]) -> None:
    graph, place = found[str(sample)]
    expected_graph, expected = sample.graph()
    producer = graph.values[graph.outputs[place]].producer
    assert producer is not None, "captured as nothing"
    node = graph.node_by_id()[producer]
    assert node.op == expected.op
    assert without_settings(node.attrs) == without_settings(expected.attrs)
    first = graph.inputs.index(node.inputs[0]) if node.inputs else 0
    assert [graph.inputs.index(i) - first for i in node.inputs] == [
        expected_graph.inputs.index(i) - expected_graph.inputs.index(expected.inputs[0])
        for i in expected.inputs
    ]
    assert len(node.outputs) == len(expected.outputs)


@pytest.mark.parametrize("sample", [s for s in SAMPLES if "empty" not in s.op], ids=str)
def test_gives_what_the_overload_gives(sample: Sample) -> None:
    torch.manual_seed(0)
    tensors = [spec.make() for spec in sample.specs()]
    graph, _ = sample.graph()
    text = class_text("Samples", [(sample.spelled(), *counts(graph))])
    module = run_class("Samples", text)().train(sample.training)
    torch.manual_seed(1)
    expected = compile_graph(graph)(tensors)
    torch.manual_seed(1)
    made = module.call_0(*tensors)
    results = [made] if isinstance(made, torch.Tensor) else list(made)
    for result, want in zip(results, expected, strict=True):
        assert torch.equal(result.nan_to_num(), want.nan_to_num())
        assert result.stride() == want.stride()


def test_every_row_has_a_sample() -> None:
    sampled = {f"aten.{sample.op}" for sample in SAMPLES}
    assert sorted(ROWS.keys() - sampled) == []


@pytest.mark.timeout(600)
def test_texts_are_typed(tmp_path: Path) -> None:
    file = tmp_path / "samples.py"
    file.write_text(written(SAMPLES))
    assert_passes_mypy([file])
