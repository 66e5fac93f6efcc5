"""One wrong thing at a time: producers, kinds of tensor, devices, sizes, constants."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardwright.ir import Builder
from shardwright.pipeline import (
    Document,
    MetadataTensor,
    ParamValue,
    StateOrigin,
    SuperTask,
    check,
)
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


CASES = cases(
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


@pytest.mark.parametrize("case", CASES)
def test_broken(case: Broken) -> None:
    prove_broken(case)


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
