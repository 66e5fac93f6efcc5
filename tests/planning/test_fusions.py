import pytest
import torch

from shardwright.ir import Builder
from shardwright.planning.fusions import find_fusions
from tests.planning.projections import (
    addmm,
    attending,
    interleaved,
    linear,
    rand,
    stacked,
    thirds,
    transformer,
)


def parts_of(graph):
    return {position: fusion.parts for position, fusion in find_fusions(graph).items()}


@pytest.mark.parametrize("taken", [thirds, stacked])
def test_columns_that_are_taken_apart_are_parts(taken):
    assert parts_of(attending(linear, taken)) == {0: [(0, 16), (16, 32), (32, 48)]}


def test_views_between_are_followed():
    assert parts_of(attending(addmm, thirds)) == {1: [(0, 16), (16, 32), (32, 48)]}


def test_a_product_whose_heads_are_outermost_is_not_fused():
    assert parts_of(attending(linear, interleaved)) == {}


def gated(takings, *, keep=False):
    """A projection to 8 columns and what is taken of it."""
    builder = Builder("gated")
    x = builder.input("x", (3, 4), "f64")
    y = linear(builder, x, "up", 8)
    made = [builder.call(f"aten.{op}", y, *args) for op, *args in takings]
    outputs = [value for item in made for value in (item if isinstance(item, list) else [item])]
    return builder.finish([*outputs, y] if keep else outputs)


SLICE = "slice.Tensor"


@pytest.mark.parametrize(
    ("takings", "parts"),
    [
        ([("chunk.default", 2, -1)], [(0, 4), (4, 8)]),
        ([("split_with_sizes.default", [5, 2, 1], 1)], [(0, 5), (5, 7), (7, 8)]),
        ([(SLICE, 1, 0, 3), (SLICE, -1, -5, 2**63 - 1)], [(0, 3), (3, 8)]),
        ([(SLICE, 1, 0, 3), (SLICE, 1, 4, 6), (SLICE, 1, 0, 3)], [(0, 3), (4, 6)]),
        ([("narrow.default", 1, 2, 2), ("select.int", 1, -1)], [(2, 4), (7, 8)]),
        ([("unbind.int", 1)], [(i, i + 1) for i in range(8)]),
    ],
)
def test_takings_along_the_columns(takings, parts):
    assert parts_of(gated(takings)) == {0: parts}


@pytest.mark.parametrize(
    "takings",
    [
        [(SLICE, 1, 0, 5), (SLICE, 1, 4, 8)],  # they overlap
        [(SLICE, 1, 0, 8, 2), (SLICE, 1, 1, 8, 2)],  # every other column
        [(SLICE, 1, 0, 4), ("relu.default",)],  # something reads all of it
        [("chunk.default", 2, 0)],  # rows, not columns
        [(SLICE, 1, 2, 6)],  # one part
    ],
)
def test_what_is_not_taken_apart(takings):
    assert parts_of(gated(takings)) == {}


def test_a_returned_product_stays():
    assert parts_of(gated([("chunk.default", 2, 1)], keep=True)) == {}


def test_a_weight_that_something_else_reads_stays():
    builder = Builder()
    x = builder.input("x", (3, 4), "f64")
    weight = builder.param("w", rand(8, 4))
    halves = builder.call(
        "aten.chunk.default", builder.call("aten.linear.default", x, weight), 2, 1
    )
    norm = builder.call("aten.sum.default", weight)
    assert parts_of(builder.finish([*halves, norm])) == {}


def test_a_weight_of_two_fused_products_is_taken_apart_in_both():
    builder = Builder()
    x = builder.input("x", (3, 4), "f64")
    weight = builder.param("w", rand(8, 4))
    outputs = []
    for _ in range(2):
        y = builder.call("aten.linear.default", x, weight)
        outputs += builder.call("aten.chunk.default", y, 2, 1)
    assert parts_of(builder.finish(outputs)) == {0: [(0, 4), (4, 8)], 2: [(0, 4), (4, 8)]}


def test_what_is_updated_after_a_run_stays():
    builder = Builder()
    x = builder.input("x", (3, 4), "f64")
    weight = builder.buffer("w", rand(8, 4))
    halves = builder.call(
        "aten.chunk.default", builder.call("aten.linear.default", x, weight), 2, 1
    )
    new = builder.call("aten.mul.Tensor", weight, 0.5)
    assert parts_of(builder.finish(halves, updates={weight.id: new.id})) == {}


def test_products_of_inputs_are_not_looked_at():
    builder = Builder()
    x, y = builder.input("x", (3, 4), "f64"), builder.input("y", (4, 8), "f64")
    halves = builder.call("aten.chunk.default", builder.call("aten.mm.default", x, y), 2, 1)
    assert parts_of(builder.finish(halves)) == {}


def test_all_layers_are_found():
    graph = transformer(layers=5)
    assert len(find_fusions(graph)) == 5
    assert torch.is_tensor(graph.run(torch.zeros(2, 6, dtype=torch.int64)))
