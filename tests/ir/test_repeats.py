import pytest
import torch

from shardwright.ir import Builder
from shardwright.ir.repeats import Repeat, crossing_bytes, repeated_blocks
from tests.graphs import language_model


def chain(*ops):
    builder = Builder()
    x = builder.input("x", (4, 4))
    for op in ops:
        x = builder.call(f"aten.{op}.default", x)
    return builder.finish(x)


def test_layers_are_found_where_they_meet():
    (repeat,) = repeated_blocks(language_model(layers=5))
    assert repeat == Repeat(start=2, length=9, count=5)
    assert repeat.cuts == [2, 11, 20, 29, 38, 47]


def test_names_and_modules_play_no_part():
    graph = language_model(layers=3)
    for i, node in enumerate(graph.nodes):
        node.scopes = ()
        graph.values[node.outputs[0]].name = f"v{i}"
    assert repeated_blocks(graph) == [Repeat(2, 9, 3)]


def test_two_stacks_of_different_layers_are_two_repeats():
    graph = chain(*("relu", "tanh", "sin") * 4, *("cos", "exp", "neg", "abs") * 3)
    assert repeated_blocks(graph) == [Repeat(0, 3, 4), Repeat(12, 4, 3)]


@pytest.mark.parametrize("ops", [("relu",), ("relu",) * 9, ("relu", "tanh", "sin", "cos")])
def test_without_layers_there_is_no_repeat(ops):
    assert repeated_blocks(chain(*ops)) == []


def test_crossing_bytes_counts_what_is_made_before_and_read_after():
    builder = Builder()
    x = builder.input("x", (2,))
    weight = builder.param("w", torch.zeros(2))
    a = builder.call("aten.add.Tensor", x, weight)  # 8 bytes, read by the last node
    b = builder.call("aten.relu.default", a)
    c = builder.call("aten.mul.Tensor", b, a)
    assert crossing_bytes(builder.finish([c, b])) == [0, 8, 16, 0]
