"""One wrong thing at a time: producers, kinds of tensor, devices, sizes, constants, their parts."""

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
from shardwright.ir import Builder
from shardwright.pipeline import (
    Document,
    MetadataTensor,
    ParamValue,
    Pipeline,
    StateOrigin,
    SuperTask,
    check,
)
from shardwright.pipeline.check_tensors import are_parts
from shardwright.pipeline.fxtext import encode
from tests.pipeline.documents import (
    COLLECTIVES,
    Broken,
    cases,
    constant,
    linear,
    prove_broken,
    task,
    tensor,
    together,
    two_stages,
    value,
    whole,
    with_state,
)

VALUE = ParamValue("w", "safetensors", "n", "i0", ((0, 4), (0, 8)))

ORIGIN = StateOrigin("momentum", ((0, 4), (8, 16)), (4, 16))


def of_state(origin: StateOrigin) -> Callable[[Document], None]:
    """A document's state with another origin."""
    return tensor("state", origin=origin)


def two_devices_one_constant(document: Document) -> None:
    document.supertasks["d1.0"].inputs = ("h2@d1", "w2")
    document.supertasks["d1.0"].data = linear(4, 8, 8)
    document.tensors["y"].shape = (4, 8)
    document.metadata.tensors.outputs["output"].shape = (4, 8)
    document.metadata.tensor_slices.outputs["y"].placements = ((0, 4), (0, 8))
    del document.tensors["w3"]


TENSORS = cases(
    Broken("an unknown input", "tensor-known", task("d0.0", inputs=("q", "w1")), "d0.0", "q"),
    Broken("an unknown output", "tensor-known", task("recv", outputs=("q",)), "recv", "q"),
    Broken(
        "one that no supertask names",
        "tensor-used",
        lambda d: d.tensors.update(spare=constant("spare", 3)),
        tensor="spare",
    ),
    Broken("two makers", "one-producer", task("d0.1", outputs=("h1",)), "d0.1", "h1"),
    Broken("twice of one maker", "one-producer", task("d0.1", outputs=("h2", "h2")), "d0.1", "h2"),
    Broken("twice an input", "one-producer", task("input", outputs=("x", "x")), "input", "x"),
    Broken("a produced constant", "one-kind", tensor("h1", value=VALUE), "d0.0", "h1"),
    Broken("a constant input", "one-kind", tensor("x", value=VALUE), "input", "x"),
    Broken("a produced state", "one-kind", tensor("h1", init="zeros"), "d0.0", "h1"),
    Broken("neither", "one-kind", tensor("w1", value=None), "d0.0", "w1"),
    Broken("value and init", "one-kind", tensor("w1", init="zeros"), tensor="w1"),
    Broken("an input", "pipeline-output", task("output", inputs=("x",)), "output", "x"),
    Broken("a constant", "pipeline-output", task("output", inputs=("w3",)), "output", "w3"),
    Broken("twice", "pipeline-output", task("output", inputs=("y", "y")), "output", "y"),
    Broken("too large", "tensor-size", tensor("h1", shape=(2**40, 2**40)), tensor="h1"),
    Broken("too few strides", "strides", tensor("h1", strides=(8,)), tensor="h1"),
    Broken("overlap of a constant", "strides", tensor("w1", strides=(0, 1)), tensor="w1"),
    Broken("overlap of an input", "strides", tensor("x", strides=(4, 1)), tensor="x"),
    Broken("overlap of what arrives", "strides", tensor("h2@d1", strides=(1, 1)), tensor="h2@d1"),
    Broken("another stage's", "one-device", task("d1.0", inputs=("h2", "w3")), "d1.0", "h2"),
    Broken("a shared constant", "one-device", two_devices_one_constant, task="d1.0", tensor="w2"),
    Broken(
        "another device's input",
        "one-device",
        together(
            task("all_reduce.0", inputs=("x1",)),
            task("all_reduce.1", inputs=("x0",)),
        ),
        "all_reduce.0",
        "x1",
        COLLECTIVES["all_reduce"],
    ),
    Broken("too few ranges", "placements", value("w1", placements=((0, 8),)), tensor="w1"),
    Broken("a shorter range", "placements", value("w1", placements=((0, 8), (0, 7))), tensor="w1"),
    Broken(
        "a range that ends before it begins",
        "placements",
        value("w1", placements=((8, 0), (0, 8))),
        tensor="w1",
    ),
    Broken(
        "a range beyond the stored tensor",
        "placements",
        value("w1", placements=((0, 8), (1, 9))),
        tensor="w1",
    ),
    Broken("no path", "weight-file", value("w2", path=""), tensor="w2"),
    Broken("a path with a NUL", "weight-file", value("w2", path="a\0b"), tensor="w2"),
    Broken("two formats", "weight-file", value("w2", format="torch.save"), tensor="w2"),
    Broken("of stored contents", "state-origin", tensor("w1", origin=ORIGIN), tensor="w1"),
    Broken(
        "without a name",
        "state-origin",
        of_state(StateOrigin("", ORIGIN.placements, ORIGIN.shape)),
        tensor="state",
        base=with_state,
    ),
    Broken(
        "a state of too few ranges",
        "placements",
        of_state(StateOrigin("momentum", ((0, 4),), (4,))),
        tensor="state",
        base=with_state,
    ),
    Broken(
        "a state beyond its whole",
        "placements",
        of_state(StateOrigin("momentum", ORIGIN.placements, (4, 15))),
        tensor="state",
        base=with_state,
    ),
)


def test_a_constant_may_be_a_part_of_a_stored_tensor() -> None:
    document = two_stages()
    stored = document.tensors["w1"].value
    assert stored is not None
    stored.placements, stored.shape = ((8, 16), (0, 8)), None
    check(document)


def test_a_state_may_be_a_part_of_a_named_whole() -> None:
    document = with_state()
    document.tensors["state"].origin = ORIGIN
    check(document)


def test_a_constant_of_no_dimensions() -> None:
    document = two_stages()
    builder = Builder()
    x, scale = builder.input("x", (4, 8)), builder.input("scale", ())
    text = encode(builder.finish([builder.call("aten.mul.Tensor", x, scale)]))
    document.supertasks["d0.0"] = SuperTask("FX", ("x", "w1"), ("h1",), "d0", text)
    document.tensors["w1"] = constant("scale")
    check(document)


@pytest.mark.parametrize("strides", [(8, 1), (1, 4), (16, 2)])
def test_strides_that_do_not_overlap(strides: tuple[int, ...]) -> None:
    document = two_stages()
    document.tensors["h2@d1"].strides = strides
    document.tensors["x"].strides = strides
    check(document)


def test_overlapping_strides_of_one_element_or_none_are_no_overlap() -> None:
    document = COLLECTIVES["all_gather with an empty piece"]()
    document.tensors["x0"].strides = (0, 1)
    document.tensors["x2"].strides = (0, 0)
    check(document)


def test_a_produced_tensor_may_be_used_again_and_returned() -> None:
    """T5's encoder states are both."""
    document = two_stages()
    document.supertasks["output"].inputs = ("y", "h1")
    metadata = document.metadata
    metadata.tensors.outputs["states"] = MetadataTensor((4, 8), "f32", 1)
    metadata.tensor_slices.outputs["h1"] = whole("states", "d0", 4, 8)
    metadata.structure = None
    check(document)


def test_a_task_may_take_one_tensor_twice() -> None:
    document = two_stages()
    builder = Builder()
    left, right = builder.input("left", (4, 8)), builder.input("right", (4, 8))
    text = encode(builder.finish([builder.call("aten.add.Tensor", left, right)]))
    document.supertasks["d0.1"] = SuperTask("FX", ("h1", "h1"), ("h2",), "d0", text)
    del document.tensors["w2"]
    check(document)


X = torch.ones(4, 8)


def built_split(tmp_path: Path) -> dict[str, Any]:
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
    document = built_split(tmp_path)
    read(document)
    change(weights(document))
    with pytest.raises(PipelineError, match=r"make up .*\[rule constant-parts\]"):
        read(document)


def test_without_the_shape_of_the_whole_some_of_it_may_be_used(tmp_path: Path) -> None:
    document = built_split(tmp_path)
    for found in weights(document):
        del found["shape"]
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


@pytest.mark.parametrize("case", TENSORS)
def test_broken(case: Broken) -> None:
    prove_broken(case)
