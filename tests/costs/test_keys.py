"""When two calls, or two units, are the same for who measures them."""

from collections.abc import Callable

import pytest
import torch

from shardwright.autodiff.needed import needing_gradients, trained_parameters
from shardwright.costs.granularity import unit_graph, units
from shardwright.costs.measurement import call_key, forward_key, unit_key, wants_gradients
from shardwright.ir import Builder, IRGraph, IRValue
from tests.graphs import language_model

Make = Callable[[Builder], IRValue]


def graph_of(make: Make) -> IRGraph:
    builder = Builder("graph")
    return builder.finish(make(builder))


def key_of(make: Make) -> str:
    """The key of the last node that is made."""
    graph = graph_of(make)
    return call_key(graph, graph.nodes[-1], needing_gradients(graph, trained_parameters(graph)))


def linear(rows: int = 3, dtype: str = "f32", name: str = "w") -> Make:
    def make(builder: Builder) -> IRValue:
        x = builder.input(f"x{name}", (rows, 4), dtype)
        weight = torch.empty(2, 4, dtype={"f32": torch.float32, "f64": torch.float64}[dtype])
        return builder.call("aten.linear.default", x, builder.param(name, weight))

    return make


def softmax(dim: int) -> Make:
    return lambda b: b.call("aten.softmax.int", b.input("x", (2, 2), "f32"), dim)


def product(*, same: bool) -> Make:
    def make(builder: Builder) -> IRValue:
        x, y = builder.input("x", (3,), "f32"), builder.input("y", (3,), "f32")
        return builder.call("aten.mul.Tensor", x, x if same else y)

    return make


def test_names_and_contents_do_not_count() -> None:
    assert key_of(linear(name="w")) == key_of(linear(name="v"))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (linear(), linear(rows=4)),
        (linear(), linear(dtype="f64")),
        (softmax(0), softmax(1)),
        (product(same=True), product(same=False)),
    ],
    ids=["shape", "dtype", "attributes", "wiring"],
)
def test_what_decides_how_long_a_call_takes_counts(one: Make, other: Make) -> None:
    assert key_of(one) != key_of(other)


def test_whose_gradients_are_wanted_counts_for_the_backward_alone() -> None:
    def second(builder: Builder) -> IRValue:
        weight = builder.param("v", torch.empty(2, 2))
        return builder.call("aten.linear.default", linear()(builder), weight)

    def first(builder: Builder) -> IRValue:
        x = builder.input("x", (3, 2), "f32")
        return builder.call("aten.linear.default", x, builder.param("v", torch.empty(2, 2)))

    assert key_of(first) != key_of(second)
    assert forward_key(key_of(first)) == forward_key(key_of(second))
    assert key_of(second).endswith(":ms")
    assert key_of(first).endswith(":-s")
    assert wants_gradients(key_of(first))
    assert not wants_gradients(key_of(softmax(0)))


def test_equal_blocks_are_one_unit_and_their_order_counts() -> None:
    graph = language_model(layers=3)
    wanted = needing_gradients(graph, trained_parameters(graph))
    blocks = [unit for unit in units(graph, graph.nodes, depth=1) if len(unit.nodes) > 1]
    assert len(blocks) == 3
    assert len({unit_key(unit_graph(graph, unit), wanted) for unit in blocks}) == 1
    assert unit_key(unit_graph(graph, blocks[0]), ()) != unit_key(
        unit_graph(graph, blocks[0]), wanted
    )
