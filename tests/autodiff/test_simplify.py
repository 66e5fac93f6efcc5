"""Views that show again what another value shows are taken out, and no others."""

import pytest
import torch

from shardwright.autodiff.record import simplify
from shardwright.ir import Builder, IRValue


def chain(builder: Builder, x: IRValue, *calls: tuple[object, ...]) -> IRValue:
    for op, *args in calls:
        x = builder.call(f"aten.{op}", x, *args)
    return x


@pytest.mark.parametrize(
    "calls",
    [
        [("t.default",), ("t.default",)],
        [("t.default",), ("permute.default", [1, 0])],
        [("view.default", [12]), ("view.default", [3, 4])],
        [("view.default", [2, 6]), ("t.default",), ("t.default",), ("view.default", [3, 4])],
        [("unsqueeze.default", 0), ("squeeze.dim", 0)],
        [("expand.default", [3, 4])],
        [("alias.default",)],
    ],
)
def test_a_way_there_and_back(calls):
    builder = Builder()
    x = builder.input("x", (3, 4))
    assert simplify(builder.graph, [chain(builder, x, *calls).id]) == [x.id]


@pytest.mark.parametrize(
    "calls",
    [
        [("t.default",), ("view.dtype", torch.int32), ("t.default",)],
        [("slice.Tensor", 0, 1, 3), ("view.default", [8]), ("view.default", [2, 4])],
        [("flip.default", [0]), ("flip.default", [0])],
        [("t.default",), ("reshape.default", [3, 4])],
    ],
)
def test_what_shows_something_else_stays(calls):
    builder = Builder()
    x = builder.input("x", (3, 4))
    found = simplify(builder.graph, [chain(builder, x, *calls).id])
    assert found != [x.id]


def test_readers_and_results_take_the_value_that_stays():
    builder = Builder()
    x = builder.input("x", (3, 4))
    again = chain(builder, x, ("t.default",), ("t.default",))
    y = builder.call("aten.relu.default", again)
    assert simplify(builder.graph, [y.id, None, again.id]) == [y.id, None, x.id]
    assert builder.graph.nodes[-1].inputs == [x.id]
