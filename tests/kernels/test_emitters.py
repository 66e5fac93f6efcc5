"""Which calls operators become, and that the calls compute what the operators do."""

import pytest
import torch

from shardwright.compiler.lowering import lower_graph
from shardwright.errors import ExecError
from shardwright.ir import Builder
from shardwright.kernels.emitters import Emitters, emit_graph
from shardwright.kernels.lowered import kind_of
from tests.compiler.running import assert_same

GENERATOR = torch.Generator()


def draw(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=torch.float64, generator=GENERATOR).to(dtype)


class Program:
    """A graph of one call on drawn inputs."""

    def __init__(self):
        self.builder = Builder("case")
        self.inputs = []

    def value(self, tensor):
        names = {"torch.float64": "f64", "torch.float32": "f32", "torch.int64": "i64"}
        names |= {"torch.bool": "bool", "torch.complex128": "c128", "torch.int32": "i32"}
        dtype = names[str(tensor.dtype)]
        self.inputs.append(tensor)
        return self.builder.input(
            f"x{len(self.inputs)}", tensor.shape, dtype, strides=tensor.stride()
        )


def case(op, *args, keep=None, **kwargs):
    """The graph of one call; tensors become inputs, ``keep`` says which results are returned."""
    program = Program()

    def convert(item):
        if isinstance(item, torch.Tensor):
            return program.value(item)
        return [convert(i) for i in item] if isinstance(item, list) else item

    made = program.builder.call(
        op, *map(convert, args), **{key: convert(item) for key, item in kwargs.items()}
    )
    made = made if isinstance(made, list) else [made]
    outputs = [value for k, value in enumerate(made) if value is not None]
    outputs = outputs if keep is None else [outputs[k] for k in keep]
    return program.builder.finish(outputs), program.inputs


def kinds(graph):
    return [kind_of(op.kind_id).name for op in lower_graph(emit_graph(graph)).ops]


def norm_backward():
    x, w, b = draw(3, 5), draw(5), draw(5)
    _, mean, rstd = torch.native_layer_norm(x, [5], w, b, 1e-5)
    return draw(3, 5), x, [5], mean, rstd, w, b


def batch_backward(training):
    x, mean, var = draw(4, 3, 2, 2), draw(3), draw(3).abs()
    _, saved, inverse = torch.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5)
    statistics = (saved, inverse) if training else (None, None)
    return draw(4, 3, 2, 2), x, draw(3), mean, var, *statistics, training, 1e-5


def attended(mask=None, causal=True):
    q, k, v = draw(2, 3, 4, 8), draw(2, 3, 4, 8), draw(2, 3, 4, 8)
    call = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    y, lse = call(q, k, v, 0.0, causal, attn_mask=mask)
    return draw(2, 3, 4, 8), q, k, v, y, lse, 0.0, causal


def adam_lists(count=3):
    shapes = [(4, 3), (5,), ()][:count]
    lists = [[draw(*shape) for shape in shapes] for _ in range(4)]
    lists[3] = [item.abs() for item in lists[3]]
    return lists, [torch.tensor(3.0) for _ in shapes]


def adam(name, amsgrad=False):
    lists, steps = adam_lists()
    largest = [item * 2 for item in lists[3]] if amsgrad else []
    numbers = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8}
    rate = torch.tensor(1e-2, dtype=torch.float64)
    return case(
        f"aten.{name}.tensor_lr",
        *lists,
        largest,
        steps,
        lr=rate,
        **numbers,
        amsgrad=amsgrad,
        maximize=True,
    )


def sgd(momentum):
    (params, grads, momentums, _), _ = adam_lists()
    return case(
        "aten._fused_sgd.tensor_lr",
        params,
        grads,
        momentums if momentum else [],
        weight_decay=0.1,
        momentum=momentum,
        lr=torch.tensor(1e-2, dtype=torch.float64),
        dampening=0.0,
        nesterov=bool(momentum),
        maximize=False,
        is_first_step=False,
    )


def one(kinds, op, *args, **kwargs):
    """The kinds that a call becomes, and what makes its graph."""
    return kinds, lambda: case(
        op if op.startswith("shardwright.") else f"aten.{op}", *args, **kwargs
    )


GENERATOR.manual_seed(0)
CASES = {
    "add": one("add", "add.Tensor", draw(3, 4), draw(3, 1), alpha=2),
    "add of whole numbers": one("add", "add.Tensor", torch.arange(4), torch.arange(4), alpha=3),
    "add of a number": one("generic", "add.Tensor", draw(3), 2.0),
    "bias_add": one("bias_add", "add.Tensor", draw(3, 4), draw(4)),
    "relu": one("relu", "relu.default", draw(3, 4).t()),
    "relu_bwd": one("relu_bwd", "threshold_backward.default", draw(4), draw(4), 0.5),
    "chain": one(
        "chain",
        "shardwright.chain.default",
        [draw(3, 1), draw(4)],
        "mul x0 x1; exp %0 -> %1 %0",
        "f64 f32",
    ),
    "dropout": one(
        "dropout",
        "shardwright.dropout.default",
        draw(4, 4),
        0.5,
        2**62,
        torch.tensor([3]),
        1,
        [0, 4],
        [4, 8],
    ),
    "sum": one("reduce_sum", "sum.default", draw(3, 4)),
    "sum of rows": one("reduce_sum", "sum.dim_IntList", draw(2, 3, 4), [0, -1], True),
    "sum of no dimension": one("reduce_sum", "sum.dim_IntList", draw(2, 3), [], False),
    "sum of flags": one("generic", "sum.default", draw(5) > 0),
    "mean": one("reduce_sum", "mean.dim", draw(2, 3, 4), [1]),
    "mean of one number": one("reduce_sum", "mean.default", draw()),
    "mm": one("gemm", "mm.default", draw(3, 4).t(), draw(3, 5)),
    "addmm of a row": one("gemm", "addmm.default", draw(5), draw(3, 4), draw(4, 5)),
    "addmm of a matrix": one(
        "gemm", "addmm.default", draw(3, 5), draw(3, 4), draw(4, 5), alpha=2.0
    ),
    "addmm with beta": one("generic", "addmm.default", draw(5), draw(3, 4), draw(4, 5), beta=2.0),
    "linear": one("gemm", "linear.default", draw(2, 3, 4), draw(5, 4), draw(5)),
    "linear with a bias for all": one("generic", "linear.default", draw(2, 4), draw(5, 4), draw(1)),
    "linear with a bias for each": one(
        "generic", "linear.default", draw(2, 4), draw(5, 4), draw(2, 5)
    ),
    "linear of a row": one("generic", "linear.default", draw(4), draw(5, 4)),
    "linear of rows apart": one(
        "gemm", "linear.default", draw(3, 2, 4).transpose(0, 1), draw(5, 4)
    ),
    "fused gemm": one(
        "gemm",
        "shardwright.gemm.default",
        draw(4, 3),
        draw(4, 5),
        draw(5),
        draw(3, 5),
        True,
        False,
        2,
        0.5,
    ),
    "bmm": one("bmm", "bmm.default", draw(2, 3, 4), draw(2, 4, 5)),
    "matmul of a stack": one("gemm", "matmul.default", draw(2, 3, 4), draw(4, 5)),
    "matmul of stacks": one("bmm", "matmul.default", draw(2, 3, 4), draw(2, 4, 5)),
    "matmul of rows": one("generic", "matmul.default", draw(4), draw(4)),
    "softmax": one("softmax", "softmax.int", draw(2, 3, 4), 1),
    "log_softmax": one("softmax", "_log_softmax.default", draw(3, 4), -1, False),
    "softmax in another dtype": one("generic", "softmax.int", draw(3, 4), -1, torch.float32),
    "softmax_bwd": one(
        "softmax_bwd", "_softmax_backward_data.default", draw(3, 4), draw(3, 4), 1, torch.float64
    ),
    "log_softmax_bwd": one(
        "softmax_bwd",
        "_log_softmax_backward_data.default",
        draw(3, 4),
        draw(3, 4),
        0,
        torch.float64,
    ),
    "layer_norm": one("layer_norm", "layer_norm.default", draw(2, 3, 4), [3, 4], draw(3, 4)),
    "native_layer_norm": one(
        "layer_norm", "native_layer_norm.default", draw(3, 4), [4], draw(4), draw(4), 0.001
    ),
    "layer_norm_bwd": one(
        "layer_norm_bwd", "native_layer_norm_backward.default", *norm_backward(), [True] * 3
    ),
    "layer_norm_bwd of some": one(
        "layer_norm_bwd",
        "native_layer_norm_backward.default",
        *norm_backward(),
        [True, False, True],
    ),
    "batch_norm evaluated": one(
        "batch_norm",
        "batch_norm.default",
        draw(4, 3, 2, 2),
        draw(3),
        draw(3),
        draw(3),
        draw(3).abs(),
        False,
        0.1,
        1e-05,
        False,
    ),
    "batch_norm trained": one(
        "batch_norm",
        "_native_batch_norm_legit_functional.default",
        draw(4, 3, 2, 2),
        draw(3),
        draw(3),
        draw(3),
        draw(3).abs(),
        True,
        0.1,
        1e-05,
    ),
    "batch_norm_bwd": one(
        "batch_norm_bwd", "native_batch_norm_backward.default", *batch_backward(True), [True] * 3
    ),
    "batch_norm_bwd evaluated": one(
        "batch_norm_bwd", "native_batch_norm_backward.default", *batch_backward(False), [True] * 3
    ),
    "attention": one(
        "attention",
        "_scaled_dot_product_flash_attention_for_cpu.default",
        *(draw(2, 3, 4, 8) for _ in range(3)),
        0.0,
        True,
    ),
    "attention with a mask": one(
        "attention",
        "scaled_dot_product_attention.default",
        *(draw(2, 3, 4, 8) for _ in range(3)),
        draw(2, 1, 4, 4),
        scale=0.3,
    ),
    "attention with flags": one(
        "generic",
        "scaled_dot_product_attention.default",
        *(draw(2, 3, 4, 8) for _ in range(3)),
        torch.ones(4, 4).tril() > 0,
    ),
    "attention_bwd": one(
        "attention_bwd", "_scaled_dot_product_flash_attention_for_cpu_backward.default", *attended()
    ),
    "embedding": one("embedding", "embedding.default", draw(5, 3), torch.tensor([[0, 4], [2, 2]])),
    "embedding_bwd": one(
        "embedding_bwd",
        "embedding_dense_backward.default",
        draw(2, 2, 3),
        torch.tensor([[0, 4], [2, 2]]),
        5,
        2,
        False,
    ),
    "cross_entropy": one(
        "cross_entropy",
        "shardwright.cross_entropy.default",
        draw(4, 3),
        torch.tensor([0, 2, -100, 1]),
        draw(3).abs(),
        1,
        -100,
    ),
    "cross_entropy_bwd": one(
        "cross_entropy_bwd",
        "shardwright.cross_entropy_bwd.default",
        draw(),
        torch.log_softmax(draw(4, 3), 1),
        torch.tensor([0, 2, -100, 1]),
        torch.tensor(3.0, dtype=torch.float64),
        None,
        1,
        -100,
    ),
    "mse": one("mse", "mse_loss.default", draw(3, 4), draw(3, 4), 1),
    "mse of rows": one("mse", "mse_loss.default", draw(3, 4), draw(3, 4), 0),
    "mse that broadcasts": one("generic", "mse_loss.default", draw(3, 4), draw(4), 2),
    "mse_bwd": one("mse_bwd", "mse_loss_backward.default", draw(), draw(3, 4), draw(3, 4), 1),
    "conv": one(
        "conv", "conv2d.default", draw(2, 4, 6, 6), draw(6, 2, 3, 3), draw(6), [2], [1], [1], 2
    ),
    "fused conv": one(
        "conv",
        "shardwright.conv.default",
        draw(2, 4, 6, 6),
        draw(6, 4, 3, 3),
        draw(6),
        draw(2, 6, 6, 6),
        [1, 1],
        [1, 1],
        [1, 1],
        1,
        1,
    ),
    "max_pool": one("pool", "max_pool2d.default", draw(2, 3, 6, 6), [3], [2], [1]),
    "avg_pool": one("pool", "avg_pool2d.default", draw(2, 3, 6, 6), [2], [], [1], False, False),
    "adaptive_pool": one("pool", "adaptive_avg_pool2d.default", draw(2, 3, 6, 6), [2, 3]),
    "uneven adaptive_pool": one("generic", "adaptive_avg_pool2d.default", draw(2, 3, 5, 5), [2, 3]),
    "adam": ("adam view view view", lambda: adam("_fused_adam")),
    "adamw": ("adamw view view view", lambda: adam("_fused_adamw", amsgrad=True)),
    "sgd": ("sgd view view view", lambda: sgd(0.0)),
    "sgd with momentum": ("sgd view view view", lambda: sgd(0.9)),
    "step_inc": one("step_inc", "_foreach_add.Scalar", [torch.tensor(1.0), torch.tensor([2.0])], 1),
    "draws counted": one("generic", "_foreach_add.Scalar", [torch.tensor([2])], 1),
    "clone": one("copy", "clone.default", draw(3, 4).t(), memory_format=torch.contiguous_format),
    "a cast": one("copy", "to.dtype", draw(3, 4), torch.float32),
    "a cast to what it is": one("view", "to.dtype", draw(3, 4), torch.float64),
    "contiguous": one("copy", "contiguous.default", draw(3, 4).t()),
    "contiguous already": one("view", "contiguous.default", draw(3, 4)),
    "reshape": one("view", "reshape.default", draw(3, 4), [2, 6]),
    "reshape by a copy": one("copy view", "reshape.default", draw(3, 4).t(), [2, 6]),
    "full": one("fill", "full.default", [2, 3], -1.5, dtype=torch.float64),
    "zeros": one("fill", "zeros_like.default", draw(3, 4)),
    "full of large numbers": one("generic", "full.default", [2], 2**60 + 1, dtype=torch.int64),
    "cat": one("concat", "cat.default", [draw(2, 3), draw(2, 1).expand(2, 2)], -1),
    "cat of dtypes": one("generic", "cat.default", [draw(2), torch.arange(2)]),
    "stack": one("view view concat", "stack.default", [draw(3, 4), draw(4, 3).t()], 1),
    "views": one("view view", "split.Tensor", draw(4, 3), 2),
    "a view of a row": one("view", "select.int", draw(4, 3), 1, -1),
    "a conjugate": one("generic", "conj.default", torch.complex(draw(3), draw(3))),
    "a real part": one("generic", "real.default", torch.complex(draw(3), draw(3))),
    "dropout in evaluation": one("view", "dropout.default", draw(3), 0.5, False),
    "arange": one("generic", "arange.default", 5),
    "topk": one("generic", "topk.default", draw(4, 5), 2),
    "topk without indices": one("generic", "topk.default", draw(4, 5), 2, keep=[0]),
}


@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
@pytest.mark.parametrize("name", CASES)
def test_calls_compute_what_the_operator_does(name, native):
    expected, make = CASES[name]
    graph, inputs = make()
    assert kinds(graph) == expected.split()
    assert_same(graph, inputs, native=native, tolerance=1e-12 if "f32" not in str(graph) else 1e-6)


def test_gradients_that_an_optimizer_returns_are_the_gradients():
    graph, inputs = adam("_fused_adamw")
    assert kinds(graph) == ["adamw"] + ["view"] * 3
    assert_same(graph, inputs, tolerance=1e-12)


def test_results_that_nobody_reads_are_not_asked_for():
    args = draw(3, 4), [4], None, None, 1e-5
    graph, _ = case("aten.native_layer_norm.default", *args, keep=[0])
    (op,) = lower_graph(emit_graph(graph)).ops
    assert op.out_vids[1:] == (-1, -1)


def test_a_builder_emits_as_it_writes():
    builder = Builder("mlp", ctx=Emitters())
    x = builder.input("x", (4, 8), "f64")
    weight = builder.param("w", draw(3, 8))
    hidden = builder.call("aten.linear.default", x, weight)
    graph = builder.finish(builder.call("aten.tanh.default", hidden))
    assert all(node.emitted for node in graph.nodes)
    assert [kind_of(op.kind_id).name for op in lower_graph(graph).ops] == ["gemm", "generic"]
    assert_same(graph, [draw(4, 8)])


def test_equal_layers_share_what_is_emitted():
    builder = Builder()
    x = builder.input("x", (4, 4), "f64")
    for _ in range(3):
        x = builder.call("aten.softmax.int", x, -1)
    graph = emit_graph(builder.finish(x))
    first, second, _ = graph.nodes
    assert first.emitted is second.emitted


def test_markers_are_refused():
    builder = Builder()
    loss = builder.input("loss", ())
    grad = builder.value("grad", (3,))
    builder.emit("Backward", [loss], {"parameters": ["w"]}, outputs=[grad])
    with pytest.raises(ExecError, match="Backward is a marker"):
        emit_graph(builder.graph)
