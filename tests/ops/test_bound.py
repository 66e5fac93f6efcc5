"""Calls with their dimensions: flows, cuts on several axes, programs."""

import pytest
import torch

from shardwright.errors import AnnotationError
from shardwright.ir import Builder
from shardwright.ir.graph import format_graph
from shardwright.ops import Carry, Cut, Slice, dimop_of, why_whole

WHOLE, PARTIAL, ANY = Carry("whole"), Carry("partial"), Carry("any")


def bound(op, *args, **kwargs):
    """The dimensions of a call; a tuple of sizes stands for a tensor, with its dtype last."""
    builder = Builder("call")

    def value(arg):
        if isinstance(arg, tuple):
            *shape, dtype = arg
            return builder.input("x", shape, dtype)
        return [value(item) for item in arg] if isinstance(arg, list) else arg

    made = builder.call(f"aten.{op}", *map(value, args), **kwargs)
    graph = builder.finish(made)
    return dimop_of(graph, graph.nodes[-1])


def linear():
    return bound("linear.default", (2, 3, 8, "f32"), (6, 8, "f32"), (6, "f32"))


def test_a_linear_layer_by_columns_and_by_rows():
    layer = linear()
    assert str(layer) == "aten.linear.default: a b k+, n k+, n -> a b n"
    assert layer.identifiers == ("a", "b", "k", "n")
    columns, rows = layer.flow("n"), layer.flow("k")
    assert columns.inputs == (WHOLE, Carry("shard", 0), Carry("shard", 0))
    assert columns.outputs == (Carry("shard", 2),)
    assert rows.inputs == (Carry("shard", 2), Carry("shard", 1), PARTIAL)
    assert rows.outputs == (PARTIAL,)
    assert layer.identifier(1, 0) == "n"
    assert layer.algorithms() == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0)]


def test_only_one_part_of_a_linear_layer_adds_the_bias():
    first, second = linear().partition(0, 2, 2)
    assert first.inputs[2] == Slice(((0, 6),), (0, 2))
    builder = Builder("parts")
    x, w, b = (builder.input(*spec) for spec in (("x", (2, 3, 4)), ("w", (6, 4)), ("b", (6,))))
    made = first.emit(builder, [x, w, b]) + second.emit(builder, [x, w, None])
    lines = [line for line in format_graph(builder.finish(made)).splitlines() if "linear" in line]
    assert "%b" in lines[0]
    assert "bias=None" in lines[1]


def test_heads_are_the_unit_of_what_a_view_makes_them_of():
    view = bound("view.default", (2, 3, 32, "f32"), [2, 3, 4, 8])
    assert str(view) == "aten.view.default: a b (c d) -> a b c d"
    assert view.flow("c").inputs == (Carry("shard", 2, 8),)
    assert view.flow("c").outputs == (Carry("shard", 2, 1),)
    parts = view.split("c", 3)
    assert [part.inputs[0].ranges[2] for part in parts] == [(0, 16), (16, 24), (24, 32)]
    assert [part.local.size() for part in parts] == [[2, 3, 2, 8], [2, 3, 1, 8], [2, 3, 1, 8]]


def test_cuts_need_not_be_even():
    part = linear().part({"n": Cut(0, 4, 0, 2), "k": Cut(3, 8, 1, 2)})
    assert part.inputs == (
        Slice(((0, 2), (0, 3), (3, 8))),
        Slice(((0, 4), (3, 8))),
        Slice(((0, 4),), (1, 2)),
    )
    assert part.outputs == (Slice(((0, 2), (0, 3), (0, 4)), (1, 2)),)


def test_sizes_among_the_arguments_are_the_parts_own():
    expand = bound("expand.default", (2, 1, 8, "f32"), [2, 5, -1])
    assert [part.attrs["size"] for part in expand.split("b", 2)] == [[2, 3, 8], [2, 2, 8]]
    norm = bound("group_norm.default", (2, 12, 5, "f32"), 3, (12, "f32"), (12, "f32"))
    assert [part.attrs["num_groups"] for part in norm.split("g", 2)] == [2, 1]
    zeros = bound("zeros.default", [7, 2])
    assert zeros.algorithms() == []
    assert zeros.identifiers == ("a", "b")
    assert zeros.split("a", 2)[0].attrs["size"] == [4, 2]


def test_what_only_gives_its_dtype_may_lie_anyhow():
    cast = bound("type_as.default", (4, 5, "f64"), (3, "i64"))
    assert cast.flow("a").inputs == (Carry("shard", 0), ANY)
    (made,) = cast.split("a", 2)[1].run([torch.full((2, 5), 2.7), None])
    assert made.tolist() == [[2] * 5] * 2


def test_masks_are_the_rows_of_the_part_where_attention_is_causal():
    queries = (1, 2, 6, 4, "f64")
    attention = bound("scaled_dot_product_attention.default", *[queries] * 3, is_causal=True)
    assert "l" in attention.identifiers
    assert attention.split("l", 2)[0].attrs["is_causal"] is True
    heads = bound("scaled_dot_product_attention.default", *[queries] * 3)
    assert heads.split("b", 2)[0].plain


def test_partial_results_of_a_maximum_are_put_together_by_it():
    largest = bound("amax.default", (4, 5, "f32"), [1])
    assert (largest.reduction, largest.flow("b").outputs) == ("max", (PARTIAL,))


def test_a_split_that_an_annotation_refuses():
    with pytest.raises(AnnotationError, match=r"'b\^' may not be split"):
        bound("softmax.int", (4, 5, "f32"), 1).partition(0, 1, 2)
    with pytest.raises(AnnotationError, match="has no identifier 'z'; it has a, b"):
        bound("relu.default", (4, 5, "f32")).flow("z")
    with pytest.raises(AnnotationError, match="a length of 4 does not give 5 parts"):
        bound("relu.default", (4, 5, "f32")).split("a", 5)


def test_what_cannot_be_split_says_why():
    builder = Builder("calls")
    x = builder.input("x", (4, 5), "f32")
    mask = builder.input("mask", (4, 5), "bool")
    made = [
        builder.call("aten.relu.default", x),
        builder.call("aten.dropout.default", x, 0.5, True),
        builder.call("aten.argmax.default", x),
        builder.call("aten.rand.default", [4, 5]),
        builder.call("aten.trace.default", x),
    ]
    graph = builder.finish([*made, mask])
    reasons = [why_whole(graph, node) for node in graph.nodes]
    assert reasons[0] is None
    assert "draws random numbers" in reasons[1]
    assert "no dimension of it may be split" in reasons[2]
    assert "no row in the catalog" in reasons[3]
    assert "gives other results each time" in reasons[3]
    assert dimop_of(graph, graph.nodes[1]) is None


def test_an_operator_outside_the_catalog_is_looked_into_by_running_it():
    found = bound("cross.default", (4, 5, 3, "f32"), (4, 5, 3, "f32"), 2)
    assert str(found) == "aten.cross.default: a b c^, a b c^ -> a b c^"
    assert found.source == "inferred"
    assert bound("cross.default", (4, 5, 3, "f32"), (4, 5, 3, "f32"), 2) is found
