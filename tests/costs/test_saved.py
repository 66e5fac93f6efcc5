"""What a backward reads is held against torch's derivatives, as `autodiff.vjp` records them."""

import pytest
import torch

from shardwright.autodiff.vjp import Call, Vjps
from shardwright.costs.saved import (
    READS,
    saved_beside,
    saved_for_backward,
    saved_for_stored,
    view_bases,
)
from shardwright.ir import Builder, resolve
from shardwright.ir.dtypes import dtype_name
from shardwright.ir.operators import split_call

VJPS = Vjps()


def real(*shape):
    return torch.randn(shape)


def whole(*shape, below):
    return torch.randint(below, shape)


X, Y, TEN = real(3, 4), real(4), torch.tensor(2.0)
IMAGE, HEADS = real(2, 4, 6, 6), real(2, 4, 5, 8)
FLAGS = torch.ones(3, 4, dtype=torch.bool)

ROWS = [
    ("add.Tensor", X, Y),
    ("sub.Tensor", X, real(3, 1)),
    ("rsub.Scalar", X, 1.0),
    ("mul.Tensor", X, Y),
    ("mul.Tensor", X, 2.0),
    ("mul.Scalar", X, 2.0),
    ("div.Tensor", X, Y),
    ("div.Tensor", X, 2.0),
    ("div.Scalar", X, 2.0),
    ("addcmul.default", X, Y, real(3, 1)),
    ("where.self", FLAGS, X, Y),
    ("where.ScalarOther", FLAGS, X, 0.0),
    ("masked_fill.Scalar", X, FLAGS, 0.0),
    ("maximum.default", X, Y),
    *((f"{name}.default", X) for name in ("neg", "clone", "abs", "sin", "cos", "erf", "silu")),
    *((f"{name}.default", X) for name in ("square", "mish", "hardswish", "log", "gelu", "elu")),
    *((f"{name}.default", X) for name in ("softplus", "nan_to_num", "exp", "tanh", "sigmoid")),
    *((f"{name}.default", X) for name in ("relu", "sqrt", "rsqrt", "reciprocal")),
    ("leaky_relu.default", X, 0.1),
    ("glu.default", X, -1),
    ("clamp.default", X, -0.5, 0.5),
    ("pow.Tensor_Scalar", X, 3.0),
    ("pow.Scalar", 2.0, X),
    ("softmax.int", X, -1),
    ("log_softmax.int", X, -1),
    ("cat.default", [X, real(2, 4)], 0),
    ("broadcast_tensors.default", [X, Y]),
    ("stack.default", [X, real(3, 4)], 0),
    ("constant_pad_nd.default", X, [1, 1]),
    ("repeat.default", X, [2, 1]),
    ("zeros_like.default", X),
    ("roll.default", X, [1], [1]),
    ("sum.dim_IntList", X, [0]),
    ("mean.dim", X, [-1]),
    ("cumsum.default", X, 1),
    ("var.correction", X, [1]),
    ("logsumexp.default", X, [1]),
    ("amax.default", X, [1]),
    ("max.dim", X, 1),
    ("topk.default", X, 2),
    ("linear.default", X, real(5, 4), real(5)),
    ("linear.default", X, real(5, 4)),
    ("addmm.default", real(5), X, real(4, 5)),
    ("baddbmm.default", real(2, 1, 5), real(2, 3, 4), real(2, 4, 5)),
    ("mm.default", X, real(4, 5)),
    ("bmm.default", real(2, 3, 4), real(2, 4, 5)),
    ("matmul.default", real(2, 3, 4), real(4, 5)),
    ("einsum.default", "bik,bkj->bij", [real(2, 3, 4), real(2, 4, 5)]),
    ("embedding.default", real(7, 3), whole(2, 5, below=7)),
    ("gather.default", X, 1, whole(3, 2, below=4)),
    ("index_select.default", X, 0, whole(5, below=3)),
    ("index.Tensor", X, [whole(5, below=3), whole(5, below=4)]),
    ("conv1d.default", real(2, 4, 9), real(6, 4, 3), real(6)),
    ("conv2d.default", IMAGE, real(6, 4, 3, 3), real(6)),
    ("conv_transpose2d.input", IMAGE, real(4, 3, 2, 2), real(3), [2, 2]),
    ("max_pool1d.default", real(2, 4, 9), [2]),
    ("max_pool2d.default", IMAGE, [3, 3], [2, 2], [1, 1]),
    ("avg_pool2d.default", IMAGE, [2, 2]),
    ("upsample_nearest2d.vec", IMAGE, None, [2.0, 2.0]),
    ("layer_norm.default", X, [4], Y, real(4)),
    ("layer_norm.default", X, [4]),
    ("rms_norm.default", X, [4], Y, 1e-6),
    ("group_norm.default", IMAGE, 2, real(4), real(4)),
    ("batch_norm.default", IMAGE, real(4), real(4), None, None, True, 0.1, 1e-5, False),
    ("cross_entropy_loss.default", X, whole(3, below=4)),
    ("mse_loss.default", X, real(3, 4)),
    ("l1_loss.default", X, real(3, 4)),
    ("scaled_dot_product_attention.default", HEADS, real(2, 4, 5, 8), real(2, 4, 5, 8)),
    (
        "scaled_dot_product_attention.default",
        *(HEADS, real(2, 4, 5, 8), real(2, 4, 5, 8)),
        torch.ones(5, 5, dtype=torch.bool),
    ),
    (
        "scaled_dot_product_attention.default",
        *(HEADS, real(2, 4, 5, 8), real(2, 4, 5, 8)),
        real(2, 1, 5, 5),
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


def recorded(graph, node, number):
    """What the derivative for one input reads: values, and bytes of what is neither."""
    gradients = {
        i: graph.values[v] for i, v in enumerate(node.outputs) if graph.values[v].dtype == "f32"
    }
    vjp = VJPS.of(Call.of(graph, node, [number], gradients))
    sources = {"input": node.inputs, "output": node.outputs}
    read = {sources[what][i] for what, i in vjp.reads if what in sources}
    saved = [i for what, i in vjp.reads if what == "saved"]
    kept = vjp.forward.outputs[len(node.outputs) :] if saved else []
    return read, sum(vjp.forward.values[kept[i]].nbytes for i in saved)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_as_torch_reads_it(row):
    graph, node = graph_of(*row)
    assert node.op in READS
    beside = []
    for number, value_id in enumerate(node.inputs):
        if graph.values[value_id].dtype != "f32" or (len(row) == 5 and number == 3):
            continue  # a gradient of an attention's mask is no operator's own
        read, bytes_beside = recorded(graph, node, number)
        assert set(saved_for_backward(graph, node, {value_id})) == read, number
        beside.append(bytes_beside)
    everything = sum(beside) if node.op == "aten.rms_norm.default" else max(beside)
    assert saved_beside(graph, node) == pytest.approx(everything, abs=16)


def test_what_nothing_is_known_of_keeps_all_that_is_real():
    graph, node = graph_of("cdist.default", real(3, 4), real(2, 4))
    assert node.op not in READS
    assert saved_for_backward(graph, node) == (*node.inputs, *node.outputs)
    assert saved_for_backward(graph, node, ()) == ()
    assert saved_beside(graph, node) == 0


def test_a_view_stands_for_what_it_is_a_view_of():
    builder = Builder("views")
    x = builder.input("x", (2, 6), "f32")
    made = builder.call("aten.relu.default", x)
    part = builder.call("aten.select.int", made, 0, 1)
    seen = builder.call("aten.view.default", part, [2, 3])
    builder.call("aten.gelu.default", seen)
    graph = builder.graph
    assert view_bases(graph) == {part.id: made.id, seen.id: made.id}
    assert saved_for_backward(graph, graph.nodes[-1]) == (made.id,)
    assert saved_for_backward(graph, graph.nodes[-1], bases={}) == (seen.id,)
    assert saved_for_backward(graph, graph.nodes[1]) == ()


def test_a_reshape_that_copies_is_no_view():
    builder = Builder("repeated heads")
    x = builder.input("x", (2, 1, 6), "f32")
    spread = builder.call("aten.expand.default", x, [2, 4, 6])
    copied = builder.call("aten.reshape.default", spread, [8, 6])
    assert view_bases(builder.graph) == {spread.id: x.id}
    builder.call("aten.gelu.default", copied)
    assert saved_for_backward(builder.graph, builder.graph.nodes[-1]) == (copied.id,)


def test_tensors_that_are_broadcast_together_are_views_of_one_each():
    builder = Builder("broadcast")
    x, y = builder.input("x", (3, 4), "f32"), builder.input("y", (4,), "f32")
    a, b = builder.call("aten.broadcast_tensors.default", [x, y])
    builder.call("aten.mse_loss.default", a, b)
    assert view_bases(builder.graph) == {a.id: x.id, b.id: y.id}
    assert saved_for_backward(builder.graph, builder.graph.nodes[-1]) == (x.id, y.id)


def test_dropout_draws_its_mask_again_and_keeps_none():
    builder = Builder("dropout")
    x, step = builder.input("x", (2, 6), "f32"), builder.input("step", (1,), "i64")
    builder.call("shardwright.dropout.default", x, 0.1, 7, step, 0, [0, 0], [2, 6])
    graph = builder.graph
    assert saved_for_backward(graph, graph.nodes[0], needing={x.id}) == ()


def test_gradients_of_parameters_that_are_made_apart_read_the_other_factor():
    """A norm's come out of one pass with that of what it is given, so nothing waits for them."""
    builder = Builder("model")
    x = builder.input("x", (2, 4))
    weight, scale = builder.param("weight", torch.ones(3, 4)), builder.param("scale", torch.ones(4))
    normal = builder.call("aten.layer_norm.default", x, [4], scale)
    builder.finish([builder.call("aten.linear.default", normal, weight)])
    graph = builder.graph
    norm, linear = graph.nodes
    trained = {weight.id, scale.id}
    assert saved_for_stored(graph, linear, trained, {}) == (normal.id,)
    assert saved_for_stored(graph, norm, trained, {}) is None
    assert saved_for_stored(graph, linear, {scale.id}, {}) is None
