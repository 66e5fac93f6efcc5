"""What a backward reads, of operators whose derivatives are known by heart."""

import pytest
import torch

from shardwright.autodiff.backward import backward_of
from shardwright.costs.placed import saved_for_backward, view_bases
from shardwright.ir import Builder, resolve
from shardwright.ir.operators import split_call
from shardwright.ir.tensor_meta import dtype_name


def real(*shape):
    return torch.randn(shape)


def whole(*shape, below):
    return torch.randint(below, shape)


X, Y = real(3, 4), real(4)
IMAGE, HEADS = real(2, 4, 6, 6), real(2, 4, 5, 8)
FLAGS = torch.ones(3, 4, dtype=torch.bool)

# For each input of floating point what its gradient reads (outputs with =), and bytes of neither.
ROWS = [
    (("add.Tensor", X, Y), ("", ""), 0),
    (("mul.Tensor", X, Y), ("1", "0"), 0),
    (("div.Tensor", X, Y), ("1", "0 1"), 0),
    (("where.self", FLAGS, X, Y), (None, "0", "0"), 0),
    (("maximum.default", X, Y), ("0 1", "0 1"), 0),
    (("relu.default", X), ("=0",), 0),
    (("gelu.default", X), ("0",), 0),
    (("softmax.int", X, -1), ("=0",), 0),
    (("cat.default", [X, real(2, 4)], 0), ("", ""), 0),
    (("sum.dim_IntList", X, [0]), ("",), 0),
    (("max.dim", X, 1), ("=1",), 0),
    (("linear.default", X, real(5, 4), real(5)), ("1", "0", ""), 0),
    (("addmm.default", real(5), X, real(4, 5)), ("", "2", "1"), 0),
    (("embedding.default", real(7, 3), whole(2, 5, below=7)), ("1",), 0),
    (("conv2d.default", IMAGE, real(6, 4, 3, 3), real(6)), ("0 1",) * 3, 0),
    (("max_pool2d.default", IMAGE, [3, 3], [2, 2], [1, 1]), ("0",), 8 * 2 * 4 * 3 * 3),
    (("cross_entropy_loss.default", X, whole(3, below=4)), ("1",), 4 * 12 + 4),
    (("l1_loss.default", X, real(3, 4)), ("", ""), 4 * 12),
    (
        ("scaled_dot_product_attention.default", HEADS, real(2, 4, 5, 8), real(2, 4, 5, 8)),
        ("0 1 2 =0",) * 3,
        4 * 2 * 4 * 5,
    ),
]


def graph_of(name, *args):
    """A graph of one call; its node."""
    op = f"aten.{name}"
    builder = Builder("call")
    tensors, _ = split_call(resolve(op), args, {})
    values = [
        builder.input("x", tensor.shape, dtype_name(tensor.dtype), strides=tensor.stride())
        for tensor in tensors
    ]

    def stands_for(argument):
        if isinstance(argument, list):
            return [stands_for(item) for item in argument]
        at = [i for i, tensor in enumerate(tensors) if tensor is argument]
        return values[at[0]] if at else argument

    builder.call(op, *map(stands_for, args))
    return builder.graph, builder.graph.nodes[-1]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][0])
def test_what_each_gradient_reads(row):
    call, reads, beside = row
    graph, node = graph_of(*call)
    for value_id, names in zip(node.inputs, reads, strict=False):
        if names is not None:
            read = {
                (node.outputs if name[0] == "=" else node.inputs)[int(name.strip("="))]
                for name in names.split()
            }
            assert set(saved_for_backward(graph, node, {value_id}, {})) == read
    found = backward_of(graph, node, node.inputs, ())
    assert found.saved == pytest.approx(beside, abs=16)


def test_what_has_no_gradient_to_give_saves_nothing():
    graph, node = graph_of("cdist.default", real(3, 4), real(2, 4))
    assert set(saved_for_backward(graph, node, node.inputs, {})) == {*node.inputs, *node.outputs}
    assert saved_for_backward(graph, node, (), {}) == ()


def test_a_view_stands_for_what_it_is_a_view_of():
    builder = Builder("views")
    x = builder.input("x", (2, 6), "f32")
    made = builder.call("aten.relu.default", x)
    part = builder.call("aten.select.int", made, 0, 1)
    seen = builder.call("aten.view.default", part, [2, 3])
    builder.call("aten.gelu.default", seen)
    graph = builder.graph
    assert view_bases(graph) == {part.id: made.id, seen.id: made.id}
    assert saved_for_backward(graph, graph.nodes[-1], set(graph.values), view_bases(graph)) == (
        made.id,
    )
    assert saved_for_backward(graph, graph.nodes[-1], set(graph.values), {}) == (seen.id,)
    assert saved_for_backward(graph, graph.nodes[1], set(graph.values), view_bases(graph)) == ()


def test_a_reshape_that_copies_is_no_view():
    builder = Builder("repeated heads")
    x = builder.input("x", (2, 1, 6), "f32")
    spread = builder.call("aten.expand.default", x, [2, 4, 6])
    copied = builder.call("aten.reshape.default", spread, [8, 6])
    assert view_bases(builder.graph) == {spread.id: x.id}
    builder.call("aten.gelu.default", copied)
    assert saved_for_backward(
        builder.graph, builder.graph.nodes[-1], set(builder.graph.values), view_bases(builder.graph)
    ) == (copied.id,)


def test_tensors_that_are_broadcast_together_are_views_of_one_each():
    builder = Builder("broadcast")
    x, y = builder.input("x", (3, 4), "f32"), builder.input("y", (4,), "f32")
    a, b = builder.call("aten.broadcast_tensors.default", [x, y])
    builder.call("aten.mse_loss.default", a, b)
    assert view_bases(builder.graph) == {a.id: x.id, b.id: y.id}
    assert saved_for_backward(
        builder.graph, builder.graph.nodes[-1], set(builder.graph.values), view_bases(builder.graph)
    ) == (x.id, y.id)


def test_dropout_draws_its_mask_again_and_keeps_none():
    builder = Builder("dropout")
    x, step = builder.input("x", (2, 6), "f32"), builder.input("step", (1,), "i64")
    builder.call("shardwright.dropout.default", x, 0.1, 7, step, 0, [0, 0], [2, 6])
    graph = builder.graph
    assert saved_for_backward(graph, graph.nodes[0], {x.id, *graph.nodes[0].outputs}, {}) == (
        step.id,
    )
