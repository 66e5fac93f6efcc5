"""The gradient of each operator is held against autograd's, to the last places of float64."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwright.autodiff import vjp as module
from shardwright.autodiff.vjp import VjpCall, Vjps
from shardwright.ir import Builder, IRGraph, resolve
from shardwright.ir.execute import compile_graph
from shardwright.ir.operators import split_call
from shardwright.ir.tensor_meta import dtype_name
from shardwright.ops import register_op
from shardwright.tracing import capture
from tests.building.derivatives import distance, run, with_gradients, wrong_kinds

VJPS = Vjps()


def real(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)


def positive(*shape: int) -> torch.Tensor:
    return real(*shape).abs() + 0.5


def whole(*shape: int, below: int) -> torch.Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(len(shape)))


def flags(*shape: int) -> torch.Tensor:
    return real(*shape) > 0


FIXED: list[torch.Tensor] = []


def fixed(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of which torch gives no gradient."""
    FIXED.append(tensor)
    return tensor


class Row(NamedTuple):
    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __str__(self) -> str:
        return self.op


def row(op: str, *args: Any, **kwargs: Any) -> Row:
    return Row(f"aten.{op}", args, kwargs)


X, Y = real(3, 4), real(4)
TWICE = real(3, 4)
IMAGE = real(2, 4, 6, 6)
LAST = IMAGE.contiguous(memory_format=torch.channels_last)
HEADS = real(2, 4, 5, 8)
LSTM = [real(16, 3), real(16, 4), real(16), real(16)]

ROWS = [
    # elementwise, with broadcasting
    row("add.Tensor", X, Y, alpha=-0.5),
    row("add.Tensor", Y, X),
    row("sub.Tensor", X, real(3, 1)),
    row("rsub.Scalar", X, 1.0),
    row("mul.Tensor", X, Y),
    row("mul.Tensor", TWICE, TWICE),
    row("mul.Tensor", X, 2.5),
    row("mul.Scalar", X, 2.5),
    row("mul.Tensor", X, torch.tensor(1.5, dtype=torch.float64)),
    row("div.Tensor", X, positive(4)),
    row("div.Scalar", X, 3.0),
    row("pow.Tensor_Scalar", positive(3, 4), 3.0),
    row("pow.Tensor_Scalar", X, 2),
    row("pow.Tensor_Tensor", positive(3, 4), Y),
    row("pow.Scalar", 2.0, X),
    row("maximum.default", X, real(3, 4).roll(1)),
    row("minimum.default", X, Y),
    row("where.self", flags(3, 4), X, Y),
    row("where.ScalarOther", flags(3, 4), X, 0.0),
    row("masked_fill.Scalar", X, flags(4), -1e9),
    row("masked_fill.Tensor", X, flags(4), torch.tensor(0.5, dtype=torch.float64)),
    row("clamp.default", X, -0.5, 0.5),
    row("clamp_min.default", X, 0.0),
    row("lerp.Scalar", X, real(3, 4).roll(1), 0.3),
    row("addcmul.default", X, Y, real(3, 1), value=0.5),
    row("addcdiv.default", X, Y, positive(3, 1), value=0.5),
    *(row(f"{name}.default", X) for name in ("abs", "neg", "exp", "sin", "cos", "tanh", "erf")),
    *(row(f"{name}.default", X) for name in ("sigmoid", "silu", "relu", "square", "expm1")),
    *(row(f"{name}.default", X) for name in ("mish", "hardswish", "hardtanh", "log_sigmoid")),
    *(row(f"{name}.default", positive(3, 4)) for name in ("log", "sqrt", "rsqrt", "reciprocal")),
    *(row(f"{name}.default", positive(3, 4)) for name in ("log1p", "log2")),
    *(row(f"{name}.default", X) for name in ("clone", "contiguous", "alias", "zeros_like")),
    *(row(f"{name}.default", X) for name in ("round", "floor", "sign", "detach", "isnan")),
    row("gelu.default", X),
    row("gelu.default", X, approximate="tanh"),
    row("leaky_relu.default", X, 0.1),
    row("elu.default", X),
    row("softplus.default", X),
    row("glu.default", X, -1),
    row("prelu.default", real(2, 3, 4), real(3)),
    row("dropout.default", X, 0.0, True),
    row("to.dtype", X, torch.float32),
    row("to.dtype", X, torch.bfloat16),
    row("to.dtype", X, torch.int64),
    row("_to_copy.default", X, dtype=torch.float32),
    row("type_as.default", X, real(2, dtype=torch.float32)),
    row("nan_to_num.default", X),
    # views and layouts
    row("view.default", X, [4, 3]),
    row("reshape.default", X.t(), [2, 6]),
    row("reshape.default", X, [12]),
    row("flatten.using_ints", real(2, 3, 4), 1),
    row("unflatten.int", X, 1, [2, 2]),
    row("t.default", X),
    row("numpy_T.default", X),
    row("transpose.int", real(2, 3, 4), 0, 2),
    row("permute.default", real(2, 3, 4), [1, 2, 0]),
    row("movedim.int", real(2, 3, 4), 0, 2),
    row("unsqueeze.default", X, 1),
    row("squeeze.dim", real(3, 1, 4), 1),
    row("squeeze.default", real(3, 1, 4)),
    row("expand.default", real(3, 1), [2, 3, 4]),
    row("expand_as.default", Y, X),
    row("repeat.default", X, [2, 1, 3]),
    row("repeat_interleave.self_int", X, 2, 1),
    row("slice.Tensor", X, 1, 1, 4, 2),
    row("select.int", X, 1, -1),
    row("narrow.default", X, 1, 1, 2),
    row("diagonal.default", X),
    row("unfold.default", X, 1, 2, 1),
    row("flip.default", X, [1]),
    row("roll.default", X, [1], [1]),
    row("tril.default", X),
    row("triu.default", X, 1),
    row("split.Tensor", X, 2, 1),
    row("split_with_sizes.default", X, [1, 3], 1),
    row("chunk.default", X, 3, 1),
    row("unbind.int", X),
    row("cat.default", [X, real(2, 4)], 0),
    row("cat.default", [TWICE, TWICE], 1),
    row("stack.default", [X, real(3, 4).roll(1)], -1),
    row("constant_pad_nd.default", X, [1, 2, 0, 1], 0.5),
    row("pad.default", IMAGE, [1, 1, 2, 2], "reflect"),
    row("pixel_shuffle.default", IMAGE, 2),
    row("meshgrid.default", [real(3), real(4)]),
    # contractions
    row("linear.default", X, real(5, 4), real(5)),
    row("linear.default", real(2, 3, 4), real(5, 4), real(5)),
    row("linear.default", real(3, 2, 4).transpose(0, 1), real(5, 4)),
    row("linear.default", X, real(4, 5).t()),
    row("linear.default", Y, real(5, 4), real(5)),
    row("mm.default", X, real(4, 5)),
    row("mm.default", real(4, 3).t(), real(5, 4).t()),
    row("addmm.default", real(5), X, real(4, 5), beta=0.5, alpha=2.0),
    row("matmul.default", real(2, 3, 4), real(4, 5)),
    row("matmul.default", real(2, 1, 3, 4), real(5, 4, 2)),
    row("matmul.default", X, Y),
    row("matmul.default", Y, real(4)),
    row("bmm.default", real(2, 3, 4), real(2, 4, 5)),
    row("baddbmm.default", real(2, 1, 5), real(2, 3, 4), real(2, 4, 5), beta=0.5, alpha=0.25),
    row("mv.default", X, Y),
    row("dot.default", Y, real(4)),
    row("outer.default", Y, real(3)),
    row("einsum.default", "bhqd,bhkd->bhqk", [HEADS, HEADS.roll(1)]),
    row("einsum.default", "ij,jk,k->i", [X, real(4, 5), real(5)]),
    row("bilinear.default", X, real(3, 2), real(5, 4, 2), real(5)),
    # reductions
    row("sum.default", X),
    row("sum.dim_IntList", X, [0], True),
    row("mean.default", X),
    row("mean.dim", X, [-1]),
    row("var.correction", X, [1], correction=0, keepdim=True),
    row("std.correction", X, [1]),
    row("var_mean.correction", X, [1]),
    row("norm.ScalarOpt_dim", X, 2.0, [1], True),
    row("linalg_vector_norm.default", X, 2.0, [1]),
    row("prod.default", Y),
    row("prod.dim_int", X, 1),
    row("cumsum.default", X, 1),
    row("cumprod.default", positive(3, 4), 1),
    row("logsumexp.default", X, [1]),
    row("amax.default", X, [1], True),
    row("amin.default", X, [0]),
    row("max.default", X),
    row("max.dim", X, 1, True),
    row("min.dim", X, 0),
    row("max.other", X, real(3, 4).roll(1)),
    row("median.dim", X, 1),
    row("topk.default", X, 2),
    row("sort.default", X, 1, True),
    row("sort.stable", X, stable=True, dim=0),
    row("argmax.default", X, 1),
    row("argsort.default", X),
    row("softmax.int", X, -1),
    row("softmax.int", real(3, 4, dtype=torch.float32), -1, torch.float64),
    row("_softmax.default", X, 1, False),
    row("log_softmax.int", X, 0),
    # indexing
    row("embedding.default", real(7, 3), whole(2, 5, below=7)),
    row("embedding.default", real(7, 3), whole(2, 5, below=7), 2),
    row("gather.default", X, 1, whole(3, 2, below=4)),
    row("scatter.src", X, 1, torch.tensor([[0, 2], [1, 3], [2, 0]]), real(3, 2)),
    row("scatter.value", X, 1, whole(3, 2, below=4), 0.5),
    row("scatter_add.default", X, 1, whole(3, 2, below=4), real(3, 2)),
    row("scatter_reduce.two", X, 1, whole(3, 2, below=4), real(3, 2), "amax"),
    row("index_select.default", X, 0, whole(5, below=3)),
    row("index_add.default", X, 0, whole(5, below=3), real(5, 4)),
    row("index_copy.default", X, 0, torch.tensor([2, 0]), real(2, 4)),
    row("index_fill.int_Scalar", X, 0, torch.tensor([2, 0]), 0.5),
    row("index.Tensor", X, [None, whole(5, below=4)]),
    row("index.Tensor", X, [whole(5, below=3), whole(5, below=4)]),
    row("index_put.default", X, [None, torch.tensor([3, 1])], real(3, 2)),
    row("index_put.default", X, [whole(5, below=3)], real(5, 4), True),
    row("masked_scatter.default", X, flags(3, 4), real(12)),
    row("select_scatter.default", X, Y, 0, 1),
    row("slice_scatter.default", X, real(3, 2), 1, 0, 4, 2),
    row("diagonal_scatter.default", X, real(3)),
    row("take_along_dim.default", X, whole(3, 2, below=4), 1),
    row("one_hot.default", whole(5, below=4), 4),
    row("bucketize.Tensor", X, torch.tensor([-1.0, 0.0, 1.0])),
    row("fill.Scalar", X, 2.0),
    row("fill.Tensor", X, torch.tensor(2.0, dtype=torch.float64)),
    # convolutions and pooling
    row("conv1d.default", real(2, 4, 9), real(6, 4, 3), real(6), [2], [1]),
    row("conv1d.padding", real(2, 4, 9), real(6, 4, 3), None, [1], "same"),
    row("conv2d.default", IMAGE, real(6, 4, 3, 3), real(6), [2, 2], [1, 1]),
    row("conv2d.default", IMAGE, real(6, 4, 3, 3)),
    row("conv2d.default", IMAGE, real(4, 1, 3, 3), real(4), [1, 1], [1, 1], [1, 1], 4),
    row("conv2d.default", LAST, real(6, 4, 3, 3), real(6)),
    row("conv3d.default", real(1, 2, 4, 4, 4), real(3, 2, 2, 2, 2), real(3)),
    row("conv_transpose2d.input", IMAGE, real(4, 3, 2, 2), real(3), [2, 2]),
    row(
        "convolution.default",
        IMAGE,
        real(6, 4, 3, 3),
        None,
        [1] * 2,
        [0] * 2,
        [1] * 2,
        False,
        [0] * 2,
        1,
    ),
    row("max_pool1d.default", real(2, 4, 9), [2]),
    row("max_pool2d.default", IMAGE, [3, 3], [2, 2], [1, 1]),
    row("avg_pool1d.default", real(2, 4, 9), [2]),
    row("avg_pool2d.default", IMAGE, [2, 2]),
    row("adaptive_avg_pool1d.default", real(2, 4, 9), [3]),
    row("adaptive_avg_pool2d.default", IMAGE, [1, 1]),
    row("adaptive_avg_pool2d.default", IMAGE, [3, 2]),
    row("adaptive_max_pool2d.default", IMAGE, [3, 2]),
    row("upsample_nearest2d.vec", IMAGE, None, [2.0, 2.0]),
    row("upsample_bilinear2d.vec", IMAGE, [9, 9], False, None),
    row("upsample_bicubic2d.vec", IMAGE, [9, 9], False, None),
    row("grid_sampler.default", IMAGE, real(2, 3, 3, 2).tanh(), 0, 0, False),
    row("im2col.default", IMAGE, [2, 2], [1, 1], [0, 0], [2, 2]),
    # norms
    row("layer_norm.default", X, [4], Y, real(4)),
    row("layer_norm.default", X, [4]),
    row("layer_norm.default", real(4, 3).t(), [4], Y, real(4)),
    row("native_layer_norm.default", X, [4], Y, real(4), 1e-5),
    row("rms_norm.default", X, [4], Y, 1e-6),
    row("group_norm.default", IMAGE, 2, real(4), real(4)),
    row("group_norm.default", IMAGE, 2),
    row("instance_norm.default", IMAGE, real(4), real(4), None, None, True, 0.1, 1e-5, False),
    row("batch_norm.default", IMAGE, real(4), real(4), None, None, True, 0.1, 1e-5, False),
    row(
        "batch_norm.default",
        IMAGE,
        real(4),
        real(4),
        fixed(real(4)),
        fixed(positive(4)),
        False,
        0.1,
        1e-5,
        False,
    ),
    row("cosine_similarity.default", X, real(3, 4).roll(1)),
    row("renorm.default", X, 2.0, 0, 1.0),
    # losses
    row("cross_entropy_loss.default", X, whole(3, below=4)),
    row("cross_entropy_loss.default", X, torch.tensor([1, -100, 3])),
    row("cross_entropy_loss.default", X, whole(3, below=4), fixed(positive(4)), 2, -100, 0.1),
    row("cross_entropy_loss.default", real(2, 4, 3), whole(2, 3, below=4)),
    row("cross_entropy_loss.default", X, real(3, 4).softmax(-1)),
    row("nll_loss_nd.default", X, whole(3, below=4)),
    row("nll_loss.default", X, torch.tensor([1, -100, 3]), None, 0),
    row("mse_loss.default", X, real(3, 4).roll(1)),
    row("l1_loss.default", X, real(3, 4).roll(1), 2),
    row("smooth_l1_loss.default", X, real(3, 4).roll(1)),
    row("huber_loss.default", X, real(3, 4).roll(1)),
    row("kl_div.default", X, real(3, 4).softmax(-1), 1),
    row("binary_cross_entropy.default", X.sigmoid(), flags(3, 4).double()),
    row("binary_cross_entropy_with_logits.default", X, flags(3, 4).double()),
    row("cosine_embedding_loss.default", X, real(3, 4).roll(1), torch.tensor([1.0, -1.0, 1.0])),
    row("triplet_margin_loss.default", X, real(3, 4).roll(1), real(3, 4).roll(2)),
    row("hinge_embedding_loss.default", X, flags(3, 4).double() * 2 - 1),
    # attention
    row("scaled_dot_product_attention.default", HEADS, HEADS.roll(1), HEADS.roll(2)),
    row(
        "scaled_dot_product_attention.default", HEADS, HEADS.roll(1), HEADS.roll(2), None, 0.0, True
    ),
    row(
        "scaled_dot_product_attention.default",
        HEADS,
        HEADS.roll(1),
        HEADS.roll(2),
        flags(5, 5) | torch.eye(5).bool(),
    ),
    row(
        "scaled_dot_product_attention.default",
        HEADS,
        HEADS.roll(1),
        HEADS.roll(2),
        real(2, 1, 5, 5),
    ),
    row(
        "scaled_dot_product_attention.default",
        HEADS,
        real(2, 2, 5, 8),
        real(2, 2, 5, 8),
        None,
        0.0,
        True,
        enable_gqa=True,
    ),
    row("scaled_dot_product_attention.default", *(real(2, 5, 4, 8).transpose(1, 2) for _ in "qkv")),
    # recurrence
    row(
        "lstm.input",
        real(5, 2, 3),
        [real(1, 2, 4), real(1, 2, 4)],
        LSTM,
        True,
        1,
        0.0,
        True,
        False,
        False,
    ),
    row("lstm_cell.default", real(2, 3), [real(2, 4), real(2, 4)], *LSTM),
    row(
        "gru.input",
        real(5, 2, 3),
        real(1, 2, 4),
        [real(12, 3), real(12, 4), real(12), real(12)],
        True,
        1,
        0.0,
        True,
        False,
        False,
    ),
    row("gru_cell.default", real(2, 3), real(2, 4), real(12, 3), real(12, 4), real(12), real(12)),
    row(
        "rnn_tanh.input",
        real(5, 2, 3),
        real(1, 2, 4),
        [real(4, 3), real(4, 4), real(4), real(4)],
        True,
        1,
        0.0,
        True,
        False,
        False,
    ),
    # matrices
    row("linalg_inv_ex.default", real(4, 4)),
    row("logdet.default", torch.eye(4).double() + 0.1),
    row("linalg_cholesky_ex.default", torch.eye(4).double() * 2 + 0.1),
    row("cdist.default", X, real(2, 4)),
    row("view_as_complex.default", real(3, 2)),
]


def one_call(case: Row) -> tuple[IRGraph, list[torch.Tensor]]:
    """A graph of one call, a tensor that stands at two places being one input."""
    tensors, attrs = split_call(resolve(case.op), case.args, case.kwargs)
    builder = Builder("call")
    distinct = list({id(tensor): tensor for tensor in tensors}.values())
    values = {
        id(x): builder.input("x", x.shape, dtype_name(x.dtype), strides=x.stride())
        for x in distinct
    }
    with warnings.catch_warnings(action="ignore"), torch.no_grad():  # of operators on their way out
        results = resolve(case.op)(*case.args, **case.kwargs)
    outputs = list(results) if isinstance(results, (list, tuple)) else [results]
    made = builder.emit(case.op, [values[id(x)] for x in tensors], attrs, outputs=outputs)
    return builder.finish(made if isinstance(made, list) else [made]), distinct


def seeds_for(made: list[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Random gradients of the outputs that can have one, by number of the output."""
    generator = torch.Generator().manual_seed(1)
    return {
        i: torch.empty_like(x).normal_(generator=generator)
        for i, x in enumerate(made)
        if x.is_floating_point() or x.is_complex()
    }


def compare(
    graph: IRGraph,
    tensors: list[torch.Tensor],
    seeds: dict[int, torch.Tensor] | None = None,
) -> IRGraph:
    """Hold the gradients of a graph against autograd's; gives the graph with its backward."""
    constant = {id(x) for x in FIXED}
    wants = [i for i, x in enumerate(tensors) if x.is_floating_point() and id(x) not in constant]
    leaves = [x.detach().requires_grad_(i in wants) for i, x in enumerate(tensors)]
    made = compile_graph(graph)(leaves)
    seeds = seeds_for(made) if seeds is None else seeds
    pairs = [(made[i], seed) for i, seed in seeds.items() if made[i].requires_grad]
    expected: list[torch.Tensor | None] = [None] * len(wants)
    if pairs:
        outputs, given = zip(*pairs, strict=True)
        sources = [leaves[i] for i in wants]
        expected = list(torch.autograd.grad(outputs, sources, given, allow_unused=True))
    found = with_gradients(
        graph,
        [graph.inputs[i] for i in wants],
        [(graph.outputs[i], seed) for i, seed in seeds.items()],
        VJPS,
    )
    assert found.present == [gradient is not None for gradient in expected]
    inputs = [*tensors, *seeds.values()]
    results = run(found.graph, inputs)
    wanted = [x.detach() for x in made] + [x for x in expected if x is not None]
    for result, expectation in zip(results, wanted, strict=True):
        if expectation.is_floating_point():
            assert distance(result, expectation) <= 1e-12
        else:
            assert torch.equal(result, expectation)
    assert wrong_kinds(found.graph, inputs) == []
    return found.graph


@pytest.mark.parametrize("case", ROWS, ids=str)
def test_gradients_are_those_of_autograd(case: Row):
    compare(*one_call(case))


def turned(x: torch.Tensor) -> torch.Tensor:
    """The same tensor, its first dimension the innermost in memory."""
    dims = list(reversed(range(x.dim())))
    return x.permute(dims).contiguous().permute(dims)


def expanded(x: torch.Tensor) -> torch.Tensor:
    """Like the tensor, but all that it has along its first dimension is one and the same."""
    return x[:1].expand(x.shape) if x.shape[0] else x


def last(x: torch.Tensor) -> torch.Tensor:
    """The same tensor, channels last where it is an image."""
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else turned(x)


def lying(case: Row, way: Callable[[torch.Tensor], torch.Tensor]) -> Row:
    """The call on tensors that lie otherwise in memory."""
    known: dict[int, torch.Tensor] = {}

    def other(item: Any) -> Any:
        if isinstance(item, (list, tuple)):
            return type(item)(map(other, item))
        if not isinstance(item, torch.Tensor) or item.dim() < 2 or not item.is_floating_point():
            return item
        if id(item) not in known:
            known[id(item)] = way(item.detach())
            if any(item is one for one in FIXED):
                FIXED.append(known[id(item)])
        return known[id(item)]

    return Row(case.op, other(case.args), {key: other(x) for key, x in case.kwargs.items()})


NOT_OTHERWISE = {
    *("aten.view.default", "aten.view_as_complex.default"),
    *("aten.linalg_inv_ex.default", "aten.logdet.default"),
}
"""Operators that take no tensors that lie otherwise, or have no result for equal rows."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", [turned, expanded, last], ids=lambda way: way.__name__)
@pytest.mark.parametrize("case", [r for r in ROWS if r.op not in NOT_OTHERWISE], ids=str)
def test_gradients_are_those_of_autograd_however_tensors_lie(
    case: Row, way: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    graph, tensors = one_call(lying(case, way))
    seeds = seeds_for(compile_graph(graph)(tensors))
    turned_seeds = {i: turned(seed) for i, seed in seeds.items()}
    compare(graph, tensors, turned_seeds)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks the kernels of the device")
@pytest.mark.parametrize(
    "case", [case for case in ROWS if "attention" in case.op or "linear" in case.op], ids=str
)
def test_a_device_that_is_not_here_gets_what_every_device_has(case: Row):
    graph, tensors = one_call(case)
    made = [x.detach() for x in compile_graph(graph)(tensors)]
    seeds = seeds_for(made)
    pairs = [(graph.outputs[i], seed) for i, seed in seeds.items()]
    wants = [v for v in graph.inputs if graph.values[v].dtype == "f64"]
    here = with_gradients(graph, wants, pairs, VJPS)
    there = with_gradients(graph, wants, pairs, Vjps("cuda"))
    assert not any("cpu" in node.op for node in there.graph.nodes)
    inputs = [*tensors, *seeds.values()]
    for found, expected in zip(run(there.graph, inputs), run(here.graph, inputs), strict=True):
        assert distance(found, expected) <= 1e-12


SAVED = [
    (row("linear.default", X, real(5, 4)), []),
    (row("linear.default", real(3, 2, 4).transpose(0, 1), real(5, 4)), []),
    (row("mul.Tensor", X, Y), []),
    (row("gelu.default", X), []),
    (row("softmax.int", X, -1), []),
    (row("expand.default", real(3, 1), [3, 4]), []),
    (row("pow.Tensor_Scalar", X, 3), []),
    (row("layer_norm.default", X, [4], Y), [(3, 1), (3, 1)]),
    (row("max_pool2d.default", IMAGE, [2, 2]), [(2, 4, 3, 3)]),
    (row("cross_entropy_loss.default", X, whole(3, below=4)), [(3, 4), ()]),
    (row("dropout.default", X, 0.5, True), [(3, 4)]),
]


@pytest.mark.parametrize(("case", "shapes"), SAVED, ids=lambda item: str(item)[:30])
def test_what_is_saved(case: Row, shapes: list[tuple[int, ...]]):
    graph, _ = one_call(case)
    (node,) = graph.nodes
    wants = [i for i, v in enumerate(node.inputs) if graph.values[v].dtype == "f64"]
    call = VjpCall.of(graph, node, wants, {0: graph.values[node.outputs[0]]})
    vjp = VJPS.of(call)
    assert (vjp.forward is None) == (not shapes)
    if vjp.forward is not None:
        made = vjp.forward.outputs[len(node.outputs) :]
        assert [vjp.forward.values[v].shape for v in made] == shapes
        assert {read.number for read in vjp.reads if read.what == "saved"} == set(range(len(made)))


def test_output_masks_follow_what_is_wanted():
    graph, _ = one_call(row("layer_norm.default", X, [4], Y, real(4)))
    (node,) = graph.nodes
    for wants, mask in (([0], [True, False, False]), ([1, 2], [False, True, True])):
        call = VjpCall.of(graph, node, wants, {0: graph.values[node.outputs[0]]})
        (backward,) = VJPS.of(call).backward.nodes
        assert backward.attrs["output_mask"] == mask
        assert backward.absent == tuple(i for i, kept in enumerate(mask) if not kept)


def test_a_kind_of_call_is_recorded_once():
    vjps = Vjps()
    graph, _ = one_call(row("mul.Tensor", X, Y))
    (node,) = graph.nodes
    gradient = graph.values[node.outputs[0]]
    first = vjps.of(VjpCall.of(graph, node, [0], {0: gradient}))
    assert vjps.of(VjpCall.of(graph, node, [0], {0: gradient})) is first
    assert vjps.of(VjpCall.of(graph, node, [1], {0: gradient})) is not first
    assert vjps.recorded == 2


def call_of(op: str, *args: Any, **kwargs: Any) -> VjpCall:
    """A call of an operator, whose first input wants a gradient."""
    graph, _ = one_call(Row(op, args, kwargs))
    (node,) = graph.nodes
    return VjpCall.of(graph, node, [0], {0: graph.values[node.outputs[0]]})


def test_a_process_records_a_kind_of_call_once() -> None:
    call = call_of("aten.mul.Tensor", real(5, 7), real(7))
    assert Vjps().of(call) is Vjps().of(call)


def test_settings_of_torch_are_no_part_of_a_call_but_of_what_is_kept() -> None:
    heads = real(1, 2, 3, 4)
    call = call_of("aten.scaled_dot_product_attention.default", heads, heads, heads)
    fused = Vjps().of(call)
    with sdpa_kernel(SDPBackend.MATH):
        written_out = Vjps().of(call)
    assert len(written_out.backward.nodes) > len(fused.backward.nodes)
    assert Vjps().of(call) is fused


@register_op("n^ -> n^", name="cubed_of_users")
def cubed_of_users(x: torch.Tensor) -> torch.Tensor:
    return x**3


class Cubed(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cubed_of_users(x)


def test_users_own_operators_are_recorded_by_each() -> None:
    """They can be registered anew, with another backward."""
    graph = capture(Cubed(), (real(3),))
    (node,) = graph.nodes
    call = VjpCall.of(graph, node, [0], {0: graph.values[node.outputs[0]]})
    assert Vjps().of(call) is not Vjps().of(call)


def test_what_is_kept_of_records_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_kept", {})
    monkeypatch.setattr(module, "_MOST_KEPT", 2)
    calls = [call_of("aten.mul.Tensor", real(1, length), real(1)) for length in (2, 3, 4)]
    first, second, third = (Vjps().of(call) for call in calls)
    assert len(module._kept) == 2
    assert Vjps().of(calls[1]) is second
    assert Vjps().of(calls[2]) is third
    assert Vjps().of(calls[0]) is not first
