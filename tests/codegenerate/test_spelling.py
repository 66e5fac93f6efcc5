"""The law of spelling: what a call is written as is captured as that very call."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from shardwright.codegenerate.spelling.table import ROWS
from shardwright.ir import compile_graph
from tests.codegenerate.checkers import assert_passes_mypy
from tests.codegenerate.recapture import Recaptured, counts, written
from tests.codegenerate.spelling_samples import Sample, class_text, run_class
from tests.codegenerate.spelling_table import SAMPLES


@pytest.fixture(scope="module")
def recaptured() -> dict[bool, Recaptured]:
    """What the samples of each mode are captured as."""
    return {
        training: Recaptured(
            [sample for sample in SAMPLES if sample.training == training and sample.captured],
            training=training,
        )
        for training in (False, True)
    }


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_text(sample: Sample) -> None:
    assert sample.spelled() == ast.unparse(ast.parse(sample.text))


@pytest.mark.parametrize("sample", [s for s in SAMPLES if s.captured], ids=str)
def test_captures_back(sample: Sample, recaptured: dict[bool, Recaptured]) -> None:
    recaptured[sample.training].assert_is_captured_back(sample)


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
