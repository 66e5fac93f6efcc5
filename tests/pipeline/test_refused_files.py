"""Files with one wrong thing, as somebody else may have written them: loading names the rule."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.errors import PipelineError


@cache
def written() -> bytes:
    """The file of a training step, of fused AdamW, in two stages."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(layer for _ in range(2) for layer in (nn.Linear(8, 8), nn.LayerNorm(8)))
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    graph = sw.compile_ir(step, torch.randn(4, 8))
    return sw.build(graph, sw.plan(graph, mesh={"pipeline": 2}, microbatches=2)).to_json()


def another_schedule(document: dict[str, Any]) -> None:
    document["training"]["schedule"]["kind"] = "zb-v"


def swapped_operands(document: dict[str, Any]) -> None:
    """A count of steps and a moment of the optimizer, which the fused update would write over."""
    tasks = document["supertasks"].values()
    inputs = next(task["inputs"] for task in tasks if "optimizer.0.bias.step" in task["inputs"])
    a, b = inputs.index("optimizer.0.bias.step"), inputs.index("optimizer.1.bias.exp_avg_sq")
    inputs[a], inputs[b] = inputs[b], inputs[a]


def long_path(document: dict[str, Any]) -> None:
    next(t for t in document["tensors"].values() if "value" in t)["value"]["path"] = "p" * 5000


def nested_argument(document: dict[str, Any]) -> None:
    text = next(task["data"] for task in document["supertasks"].values() if "data" in task)
    graph = json.loads(text)
    graph["nodes"][0]["args"][0] = "HERE"
    deep = json.dumps(graph).replace('"HERE"', "[" * 900 + "]" * 900)
    for task in document["supertasks"].values():
        if task.get("data") == text:
            task["data"] = deep


@pytest.mark.parametrize(
    ("change", "rule", "message"),
    [
        (another_schedule, "schedule", "zb-v has 2 stages a rank, not 1"),
        (swapped_operands, "graph-calls", "makes f32.* the text says f32"),
        (nested_argument, "graph", "nests deeper than any graph does"),
        (long_path, "weight-file", "is no path of a parameter file"),
    ],
)
def test_a_changed_file_is_refused_when_it_is_loaded(
    change: Callable[[dict[str, Any]], None], rule: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(written())
    sw.Pipeline.load(path)
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(PipelineError, match=message) as caught:
        sw.Pipeline.load(path)
    assert caught.value.rule == rule


@pytest.mark.parametrize(
    ("place", "message"),
    [("file", "a number beyond any size"), ("graph", "Integer value out of range")],
)
def test_a_number_of_too_many_digits_is_refused(place: str, message: str, tmp_path: Path) -> None:
    """Python reads none of more than 4300."""
    path = tmp_path / "a.json"
    shape = r'("shape": ?\[)4' if place == "file" else r'(\\"shape\\": ?\[)4'
    text, count = re.subn(shape, rf"\g<1>{'9' * 5000}", written().decode(), count=1)
    assert count
    path.write_text(text)
    with pytest.raises(PipelineError, match=message):
        sw.Pipeline.load(path)
