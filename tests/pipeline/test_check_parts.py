"""Parts of stored tensors make them up, and updates land."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.errors import PipelineError
from shardwright.pipeline import Pipeline
from shardwright.pipeline.check_tensors import are_parts

X = torch.ones(4, 8)


def split(tmp_path: Path) -> dict[str, Any]:
    """The document of a linear layer of which each device has half."""
    graph = sw.capture(nn.Sequential(nn.Linear(8, 8)).eval(), (X,))
    return documented(tmp_path, sw.build(graph, sw.plan(graph, mesh={"tensor": 2})))


def documented(tmp_path: Path, pipeline: Pipeline) -> dict[str, Any]:
    pipeline.save(tmp_path / "a.json")
    found: dict[str, Any] = json.loads((tmp_path / "a.json").read_text())
    return found


def weights(document: dict[str, Any]) -> list[dict[str, Any]]:
    values = [t["value"] for t in document["tensors"].values() if "value" in t]
    return [value for value in values if len(value["placements"]) == 2]


def read(document: dict[str, Any]) -> Pipeline:
    return Pipeline.from_json(json.dumps(document).encode())


def same_part(values: list[dict[str, Any]]) -> None:
    values[1]["placements"] = values[0]["placements"]


def shifted(values: list[dict[str, Any]]) -> None:
    values[1]["placements"] = [[3, 7], [0, 8]]


def another_shape(values: list[dict[str, Any]]) -> None:
    values[1]["shape"] = [9, 8]


@pytest.mark.parametrize("change", [same_part, shifted, another_shape])
def test_parts_that_are_not_all_are_refused(
    tmp_path: Path, change: Callable[[list[dict[str, Any]]], None]
) -> None:
    document = split(tmp_path)
    read(document)
    change(weights(document))
    with pytest.raises(PipelineError, match=r"make up .*\[rule constant-parts\]"):
        read(document)


def test_without_the_shape_of_the_whole_some_of_it_may_be_used(tmp_path: Path) -> None:
    document = split(tmp_path)
    for value in weights(document):
        del value["shape"]
    same_part(weights(document))
    read(document)
    shifted(weights(document))
    with pytest.raises(PipelineError, match="constant-parts"):
        read(document)


def test_without_it_what_is_stored_tells_what_is_missing(tmp_path: Path) -> None:
    """As in a plain file, where no constant says the shape of what is stored."""
    graph = sw.capture(nn.Sequential(nn.Linear(8, 8)).eval(), (X,))
    path = tmp_path / "a.json"
    sw.build(graph, sw.plan(graph, mesh={"tensor": 2})).save(path, plain=True)
    sw.run(path, X, in_process=True)
    document = json.loads(path.read_text())
    same_part(weights(document))
    path.write_text(json.dumps(document))
    with pytest.warns(
        UserWarning,
        match=r"of '0.weight' in .*, of the shape \[8, 8\], .*\[0, 4\), \[0, 8\).* only",
    ):
        sw.run(path, X, in_process=True)


class Unused(nn.Module):
    """Of the fused projection nobody reads the first third."""

    def __init__(self) -> None:
        super().__init__()
        self.fused, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        _, key, value = self.fused(x).split(8, -1)
        joined: Tensor = self.out(torch.relu(key) * value)
        return joined


def test_what_a_program_does_not_use_is_no_part(tmp_path: Path) -> None:
    model = Unused().eval()
    graph = sw.capture(model, (X,))
    pipeline = sw.build(graph, sw.plan(graph, mesh={"tensor": 2}))
    pipeline.save(tmp_path / "a.json")
    sw.verify(tmp_path / "a.json", model, (X,), tolerance=1e-5)


@pytest.mark.parametrize(
    ("parts", "shape", "right"),
    [
        ([((0, 2),), ((2, 4),)], (4,), True),
        ([((2, 4),), ((0, 2),)], None, True),
        ([((0, 2),), ((3, 4),)], None, True),
        ([((0, 2),), ((3, 4),)], (4,), False),
        ([((0, 3),), ((2, 4),)], None, False),
        ([((0, 2), (0, 4)), ((2, 4), (0, 4)), ((0, 4), (0, 2)), ((0, 4), (2, 4))], (4, 4), True),
        ([((0, 2), (0, 4)), ((2, 4), (0, 4)), ((0, 4), (0, 2))], (4, 4), False),
        ([((0, 4),), ((0, 2),), ((2, 4),)], (4,), True),
        ([((0, 4),), ((4, 4),)], (4,), True),
        ([((0, 2),), ((2, 4),)], (5,), False),
        ([((0, 0), (0, 3))], (0, 3), True),
        ([()], (), True),
        ([(), ((0, 1),)], None, False),
    ],
)
def test_each_element_is_in_as_many_parts_as_any_other(
    parts: Any, shape: tuple[int, ...] | None, right: bool
) -> None:
    assert are_parts(parts, shape) is right


@pytest.mark.parametrize("mesh", [{"pipeline": 2}, {"data": 2}, {"tensor": 2}], ids=str)
def test_an_update_that_does_not_land_is_refused(tmp_path: Path, mesh: dict[str, int]) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    graph = sw.compile_ir(step, X)
    document = documented(tmp_path, sw.build(graph, sw.plan(graph, mesh=mesh)))
    for new in document["training"]["replaces"]:
        replaces = {k: v for k, v in document["training"]["replaces"].items() if k != new}
        with pytest.raises(PipelineError) as caught:
            read({**document, "training": {**document["training"], "replaces": replaces}})
        assert caught.value.rule in ("lands", "once-a-step"), new
