"""The references of the registered operators against torch, and their fakes against them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardwright.errors import ExecError
from shardwright.ir import Builder
from shardwright.ir.operators import is_built_in
from shardwright.kernels import operators
from shardwright.kernels.row import ACTIVATIONS

F = torch.nn.functional

A, B = torch.randn(2, 5, 4), torch.randn(3, 4)
BIAS, RESIDUAL = torch.randn(3), torch.randn(2, 5, 3)
LABELS, WEIGHT = torch.tensor([0, 3, -100, 2, 1]), torch.rand(4) + 0.5
LOGITS = torch.randn(5, 4)
IMAGE, FILTER = torch.randn(2, 4, 6, 5), torch.randn(8, 2, 3, 3)


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-6) -> bool:
    return bool((found - expected).abs().max() <= tolerance * expected.abs().max())


@pytest.mark.parametrize(
    ("activation", "function"),
    [
        ("none", lambda x: x),
        ("relu", F.relu),
        ("gelu", F.gelu),
        ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh")),
        ("silu", F.silu),
        ("tanh", torch.tanh),
        ("sigmoid", torch.sigmoid),
    ],
)
def test_gemm_is_a_linear_layer_and_what_follows(
    activation: str, function: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    number = ACTIVATIONS.index(activation)
    made = operators.gemm(A, B, BIAS, RESIDUAL, False, True, number, 0.5)
    assert made.is_contiguous()
    assert close(made, function(0.5 * (A @ B.t()) + BIAS + RESIDUAL))


def test_gemm_of_transposed_operands() -> None:
    a, b = torch.randn(4, 5), torch.randn(4, 3)
    assert torch.equal(operators.gemm(a, b, None, None, True, False, 0, 1.0), a.t() @ b)


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ExecError, match="activation 7 is unknown"):
        operators.gemm(A, B, None, None, False, True, 7, 1.0)


@pytest.mark.parametrize("weight", [None, WEIGHT])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_cross_entropy_and_its_gradient(weight: torch.Tensor | None, reduction: str) -> None:
    x = LOGITS.clone().requires_grad_()
    expected = F.cross_entropy(x, LABELS, weight, reduction=reduction)
    dloss = torch.randn(expected.shape)
    expected.backward(dloss)
    number = ("none", "mean", "sum").index(reduction)
    loss, total, log_probs = operators.cross_entropy(LOGITS, LABELS, weight, number, -100)
    assert torch.equal(loss, expected.detach())
    dx = operators.cross_entropy_bwd(dloss, log_probs, LABELS, total, weight, number, -100)
    assert x.grad is not None
    assert torch.equal(dx, x.grad)


def test_conv_is_a_convolution_and_what_follows() -> None:
    options: list[Any] = [[2, 1], [1, 0], [1, 1], 2]
    bias, expected = torch.randn(8), F.conv2d(IMAGE, FILTER, None, *options)
    residual = torch.randn(expected.shape)
    made = operators.conv(IMAGE, FILTER, bias, residual, *options, 1)
    assert close(made, F.relu(expected + bias.view(1, -1, 1, 1) + residual))


def test_chain_runs_its_program() -> None:
    program = "mul x0 x1; gt %0 0.0; where %1 %0 x0 -> %2 %1"
    made, mask = operators.chain([RESIDUAL, BIAS], program, "f32 bool")
    product = RESIDUAL * BIAS
    assert torch.equal(made, torch.where(product > 0, product, RESIDUAL))
    assert torch.equal(mask, product > 0)


CHANNELS_LAST = IMAGE.to(memory_format=torch.channels_last)
DLOSS, TOTAL = torch.tensor(1.0), torch.tensor(4.0)
CALLS: list[tuple[str, tuple[Any, ...]]] = [
    ("gemm", (A, B, BIAS, None, False, True, 2, 1.0)),
    ("gemm", (A.transpose(0, 1), B, None, None, False, True, 0, 1.0)),
    ("gemm", (B, B, None, None, True, False, 0, 1.0)),
    ("chain", ([RESIDUAL, BIAS], "add x0 x1 -> %0", "f32")),
    ("chain", ([RESIDUAL.transpose(0, 2), BIAS[:, None, None]], "add x0 x1 -> %0", "f16")),
    ("chain", ([torch.ones(4, 1), torch.ones(3)], "lt x0 x1 -> %0 %0", "bool f64")),
    ("cross_entropy", (LOGITS, LABELS, None, 1, -100)),
    ("cross_entropy", (LOGITS.t().contiguous().t(), LABELS, WEIGHT, 0, -100)),
    ("cross_entropy_bwd", (DLOSS, LOGITS, LABELS, TOTAL, None, 1, -100)),
    ("conv", (IMAGE, FILTER, None, None, [1, 1], [1, 1], [1, 1], 2, 1)),
    ("conv", (CHANNELS_LAST, FILTER, BIAS.new_ones(8), None, [2, 2], [0, 0], [1, 1], 2, 0)),
]


@pytest.mark.parametrize(("name", "args"), CALLS)
def test_a_fake_says_what_is_made(name: str, args: tuple[Any, ...]) -> None:
    operator = getattr(torch.ops.shardwright, name).default
    made = operator(*args)
    builder = Builder()

    def value(item: Any) -> Any:
        if isinstance(item, list):
            return [value(part) for part in item]
        if isinstance(item, torch.Tensor):
            return builder.constant(f"c{len(builder.graph.values)}", item)
        return item

    found = builder.call(f"shardwright.{name}.default", *map(value, args))
    made, found = ([x] if not isinstance(x, (list, tuple)) else x for x in (made, found))
    graph = builder.finish(outputs=list(found))
    for real, value_id in zip(made, graph.outputs, strict=True):
        told = graph.values[value_id]
        empty = torch.empty(told.shape)
        strides = told.strides if told.strides is not None else empty.stride()
        assert tuple(real.shape) == told.shape
        assert real.stride() == tuple(strides)


def test_every_process_has_the_operators() -> None:
    for name in ("gemm", "chain", "cross_entropy", "cross_entropy_bwd", "conv"):
        assert is_built_in(f"shardwright.{name}.default")
