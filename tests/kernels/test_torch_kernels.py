"""Torch's side of kinds where it is not one operator: forms, memory that is shared, optimizers."""

import pytest
import torch

from shardwright.errors import ExecError
from shardwright.ir import resolve
from shardwright.kernels.attention import attend, attend_backward
from shardwright.kernels.lowered import bind_torch
from shardwright.kernels.operators import gemm
from shardwright.kernels.row import ACTIVATIONS
from shardwright.kernels.torch_kernels import out_overload
from tests.compiler.running import assert_close


def draw(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("activation", range(len(ACTIVATIONS)))
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("residual", [None, "apart", "in place"])
@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_gemm_with_what_follows_it(activation, bias, residual, alpha):
    a, b = draw(2, 3, 4), draw(5, 4, seed=1)
    c = draw(5, seed=2) if bias else None
    added = draw(2, 3, 5, seed=3) if residual else None
    wanted = gemm(a, b, c, added, False, True, activation, alpha)
    y = added if residual == "in place" else torch.full((2, 3, 5), float("nan")).double()
    attrs = {"transpose_b": 1, "activation": activation, "alpha": alpha}
    bind_torch("gemm", attrs, [a, b, c, added], [y])()
    assert_close(y, wanted, 1e-13)


def test_gemm_of_rows_apart_and_into_columns():
    a, b = draw(3, 2, 4).transpose(0, 1), draw(4, 5)
    y = torch.empty(5, 3, 2, dtype=torch.float64).permute(2, 1, 0)
    bind_torch("gemm", {}, [a, b, None, None], [y])()
    assert_close(y, a @ b, 1e-13)


@pytest.mark.parametrize("shape", [(5,), (5, 5), (3, 5, 5), (3, 1, 5), (2, 1, 5, 5)])
def test_masks_of_attention_have_up_to_four_dimensions(shape):
    q, k, v, dy = (draw(2, 3, 5, 4, seed=seed) for seed in range(4))
    mask = draw(*shape, seed=5)
    y, lse = torch.empty_like(q), torch.empty(2, 3, 5, dtype=torch.float64)
    made = [torch.empty_like(q) for _ in range(3)]
    attrs = {"causal": 0, "scale": 0.4}
    bind_torch("attention", attrs, [q, k, v, mask], [y, lse])()
    bind_torch("attention_bwd", attrs, [dy, q, k, v, y, lse, mask], made)()
    wanted, sums = attend(q, k, v, mask, False, 0.4)
    assert_close(y, wanted, 1e-6)
    assert_close(lse, sums.double(), 1e-6)
    gradients = attend_backward(dy, q, k, v, y, lse, mask, False, 0.4)
    for found, gradient in zip(made, gradients, strict=True):
        assert_close(found, gradient, 1e-6)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_written_out_is_the_operator_of_the_cpu(causal, masked):
    q, k, v, dy = (draw(2, 3, 5, 4, seed=seed) for seed in range(4))
    mask = draw(2, 1, 5, 5, seed=5) if masked else None
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    y, lse = flash(q, k, v, 0.0, causal, attn_mask=mask, scale=0.4)
    found, found_lse = attend(q, k, v, mask, causal, 0.4)
    assert_close(found, y, 1e-6)
    assert_close(found_lse.double(), lse, 1e-6)
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    wanted = backward(dy, q, k, v, y, lse, 0.0, causal, attn_mask=mask, scale=0.4)
    made = attend_backward(dy, q, k, v, y, lse, mask, causal, 0.4)
    for a, b in zip(made, wanted, strict=True):
        assert_close(a, b, 1e-6)


OPTIMIZERS = {
    "adam": (torch.optim.Adam, {}),
    "adam, amsgrad": (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1, "maximize": True}),
    "sgd": (torch.optim.SGD, {"weight_decay": 0.1}),
    "sgd, nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("apart", [False, True], ids=["in place", "apart"])
def test_optimizers_are_torchs_over_a_hundred_steps(name, apart):
    optimizer_class, options = OPTIMIZERS[name]
    mine = [draw(4, 3), draw(5, seed=1)]
    theirs = [torch.nn.Parameter(p.clone()) for p in mine]
    optimizer = optimizer_class(theirs, lr=1e-2, foreach=False, **options)
    kind = name.split(",")[0]
    count = len(mine)
    zeros = [[torch.zeros_like(p) for p in mine] for _ in range(3)]
    if kind == "sgd":
        states = [zeros[0] if options.get("momentum") else [None] * count]
    else:
        states = [zeros[0], zeros[1], zeros[2] if options.get("amsgrad") else [None] * count]
    steps = [torch.tensor(0.0) for _ in mine]
    grads = [torch.empty_like(p) for p in mine]
    rate = torch.tensor(1e-2, dtype=torch.float64)
    attrs = {k: (v if isinstance(v, float) else int(v)) for k, v in options.items()}
    lists = [mine, *states]
    made = [[x if x is None or not apart else torch.empty_like(x) for x in xs] for xs in lists]
    counters = [] if kind == "sgd" else steps
    ins = [*mine, *grads, *(x for xs in states for x in xs), *counters, rate]
    run = bind_torch(kind, attrs, ins, [x for xs in made for x in xs])
    count_up = bind_torch("step_inc", {}, steps, steps)
    for step in range(100):
        for k, (gradient, parameter) in enumerate(zip(grads, theirs, strict=True)):
            gradient.copy_(draw(*gradient.shape, seed=100 * step + k))
            parameter.grad = gradient.clone()
        optimizer.step()
        count_up()
        run()
        for olds, news in zip(lists, made, strict=True):
            for old, new in zip(olds, news, strict=True):
                if old is not None and old is not new:
                    old.copy_(new)
    for a, b in zip(mine, theirs, strict=True):
        assert_close(a, b.detach(), 1e-12)


def test_generic_calls_write_where_they_are_told():
    x, y = draw(3, 4), torch.empty(3, 4, dtype=torch.float64)
    attrs = {"op": "aten.sin.default", "call": '{"args":[{"input":0}],"kwargs":{}}'}
    bind_torch("generic", attrs, [x], [y])()
    assert torch.equal(y, x.sin())
    for call in ("", "{}", '{"args":[{"input":"?"}],"kwargs":{}}', "[]"):
        with pytest.raises(ExecError, match=r"arguments of aten.sin.default cannot be read"):
            bind_torch("generic", {"op": "aten.sin.default", "call": call}, [x], [y])


@pytest.mark.parametrize(
    ("op", "names"),
    [
        ("aten.sin.default", ("out",)),
        ("aten.mul.Tensor", ("out",)),
        ("aten.topk.default", ("values", "indices")),
        ("aten.sum.dim_IntList", ("out",)),
        ("aten.gelu.default", ("out",)),
        ("aten.gelu_backward.default", ("grad_input",)),
    ],
)
def test_operators_with_a_kernel_that_writes(op, names):
    found = out_overload(resolve(op))
    assert found is not None
    assert found[1] == names


@pytest.mark.parametrize(
    "op",
    [
        "aten.relu.default",
        "aten.clone.default",
        "aten.embedding.default",
        "aten.native_layer_norm.default",
        "aten.convolution.default",
        "aten.ones_like.default",
        "aten._foreach_add.Scalar",
    ],
)
def test_wrappers_that_torch_generated_do_not_count(op):
    assert out_overload(resolve(op)) is None


@pytest.mark.parametrize(("dims", "shape"), [((0, 1), ()), ((1,), (2,)), ((1,), (2, 1))])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_mean_of_many_halves_is_no_infinity(dims, shape, dtype):
    x, y = torch.ones(2, 70000, dtype=dtype), torch.empty(shape, dtype=dtype)
    count = 70000 * (2 if len(dims) == 2 else 1)
    bind_torch("reduce_sum", {"dims": dims, "scale": 1 / count}, [x], [y])()
    assert torch.equal(y, torch.ones(shape, dtype=dtype))


def test_a_scaled_sum_over_nothing_leaves_what_it_reads():
    x, y = torch.full((3,), 100000.0), torch.empty(3, dtype=torch.float16)
    bind_torch("reduce_sum", {"dims": (), "scale": 0.5}, [x], [y])()
    assert torch.equal(y, torch.full((3,), 50000.0, dtype=torch.float16))
    assert torch.equal(x, torch.full((3,), 100000.0))
