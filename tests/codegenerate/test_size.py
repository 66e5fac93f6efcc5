"""How long generated files are, and how long they take: repeated layers are one class."""

import re
import time
from functools import cache
from pathlib import Path

import pytest
import torch

import shardwright as sw
from benchmarks.models import GPT
from shardwright.ir import IRGraph

MOST_LINES = 1200
MOST_SECONDS = 15


@cache
def gpt2_size(layers: int) -> IRGraph:
    """A GPT of GPT-2's width, without contents."""
    with sw.empty_weights():
        model = GPT(layers, 768, 12, vocabulary=50257, length=1024)
    return sw.capture(model.eval(), (torch.zeros(1, 32, dtype=torch.int64),))


def classes(text: str) -> list[str]:
    return re.findall(r"^class (\w+)", text, re.MULTILINE)


@pytest.mark.parametrize("policy", ["pipeline", "metis"])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_twelve_layers_are_one_class(policy: str, stages: int, tmp_path: Path) -> None:
    graph, path = gpt2_size(12), tmp_path / "gpt2.py"
    sw.codegen(sw.plan(graph, stages, policy), path, graph=graph)
    text = path.read_text()
    whole = [name for name in classes(text) if re.fullmatch(r"Block\d*", name)]
    assert len(text.splitlines()) < MOST_LINES
    assert len(whole) <= 1 + 2 * (stages - 1), "a block a cut goes through is in two pieces"
    sw.codegen(sw.plan(graph, stages, policy), path, True, graph)
    assert len(path.read_text().splitlines()) < MOST_LINES


def test_ninety_six_layers_are_as_long_as_twelve_and_written_in_seconds(tmp_path: Path) -> None:
    lengths = {}
    for layers in (12, 96):
        graph, path = gpt2_size(layers), tmp_path / f"gpt{layers}.py"
        plan = sw.plan(graph, 2)
        start = time.perf_counter()
        sw.codegen(plan, path, graph=graph)
        assert time.perf_counter() - start < MOST_SECONDS
        lengths[layers] = len(path.read_text().splitlines())
    assert lengths[96] < 1.2 * lengths[12]
