"""Operators become what kernels exist for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from shardwright.compiler.passes.decompose import Composites, decompose, is_composed
from shardwright.ir import Builder, IRGraph
from shardwright.kernels.lowered import KINDS
from shardwright.kernels.row import KernelRow
from tests.compiler.passes.rewritten import calls, captured, operators, rewritten
from tests.rounding import BITS

A, B = torch.randn(3, 4), torch.randn(4, 5)
X = torch.randn(2, 3, 4)
Q = torch.randn(2, 4, 6, 8)


def decomposed(function: Callable[..., Any], *inputs: torch.Tensor, **modules: Any) -> IRGraph:
    return rewritten(captured(function, *inputs, **modules), decompose, inputs)


def test_a_linear_layer_is_a_gemm_with_its_leading_dimensions() -> None:
    after = decomposed(lambda self, x: self.layer(x), X, layer=torch.nn.Linear(4, 5))
    assert calls(after) == [
        "gemm(args_0, layer.weight, layer.bias, transpose_b=True) -> linear",
    ]


PRODUCTS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...], str]] = {
    "mm": (torch.mm, (A, B), "gemm(args_0, args_1) -> mm"),
    "a transposed": (
        lambda a, b: a.t() @ b,
        (B, B),
        "gemm(args_0, args_1, transpose_a=True) -> matmul",
    ),
    "b transposed": (
        lambda a, b: a @ b.transpose(-1, -2),
        (A, A),
        "gemm(args_0, args_1, transpose_b=True) -> matmul",
    ),
    "permuted": (
        lambda a, b: a.permute(1, 0) @ b,
        (B, B),
        "gemm(args_0, args_1, transpose_a=True) -> matmul",
    ),
    "permuted to itself": (
        lambda a, b: a.permute(0, 1) @ b,
        (A, B),
        "gemm(permute, args_1) -> matmul",
    ),
    "linear of a transposed weight": (
        lambda a, w: F.linear(a, w.t()),
        (A, B),
        "gemm(args_0, args_1) -> linear",
    ),
    "bias": (
        lambda c, a, b: torch.addmm(c, a, b, alpha=2),
        (torch.randn(5), A, B),
        "gemm(args_1, args_2, args_0, alpha=2.0) -> addmm",
    ),
    "residual": (
        torch.addmm,
        (torch.randn(3, 5), A, B),
        "gemm(args_1, args_2, args_0) -> addmm",
    ),
    "beta": (
        lambda c, a, b: torch.addmm(c, a, b, beta=2),
        (torch.randn(5), A, B),
        "addmm(args_0, args_1, args_2, beta=2) -> addmm",
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str) -> None:
    function, inputs, expected = PRODUCTS[name]
    # A matrix is added behind the product, where addmm may begin with it.
    after = rewritten(
        captured(function, *inputs),
        decompose,
        inputs,
        tolerance=BITS if name == "residual" else 0.0,
    )
    assert calls(after)[-1] == expected


def test_integers_stay_as_they_are() -> None:
    a = torch.arange(6).reshape(2, 3)
    assert operators(decomposed(torch.mm, a, a.t().contiguous())) == ["mm"]


def test_baddbmm_comes_apart() -> None:
    c, a = torch.randn(2, 3, 3), torch.randn(2, 3, 4)
    b = a.transpose(1, 2).contiguous()
    graph = captured(lambda c, a, b: torch.baddbmm(c, a, b, beta=0.5, alpha=2), c, a, b)
    after = rewritten(graph, decompose, (c, a, b), tolerance=1e-6)
    assert operators(after) == ["bmm", "mul", "mul", "add"]


def test_a_stack_is_a_concatenation() -> None:
    after = decomposed(lambda a, b: torch.stack([a, b], -1), A, A + 1)
    assert operators(after) == ["unsqueeze", "unsqueeze", "cat"]


def test_a_sum_of_truth_is_a_cast_and_a_sum() -> None:
    after = decomposed(lambda a: (a > 0).sum(dtype=torch.float32), A)
    assert operators(after) == ["gt", "_to_copy", "sum"]


COMPOSED: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...], list[str]]] = {
    "softmax": (lambda x: x.softmax(-1), (X,), ["_softmax"]),
    "layer norm": (lambda x: F.layer_norm(x, [4]), (X,), ["native_layer_norm"]),
    "dropout in evaluation": (lambda x: F.dropout(x, 0.5, False) + 1, (X,), ["add"]),
    "reshape": (lambda x: x.reshape(6, 4), (X,), ["view"]),
    "reshape of a transpose": (
        lambda x: x.transpose(0, 1).reshape(6, 4),
        (X,),
        ["transpose", "clone", "_unsafe_view"],
    ),
    "contiguous": (lambda x: x.contiguous() + 1, (X,), ["add"]),
    "cross entropy": (
        F.cross_entropy,
        (A, torch.tensor([1, 2, 0])),
        ["_log_softmax", "nll_loss_forward"],
    ),
    "batches": (lambda q: q @ q.mT, (Q,), ["transpose", "view", "view", "bmm"]),
    "attention": (
        lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True),
        (Q,),
        ["_scaled_dot_product_flash_attention_for_cpu"],
    ),
}


@pytest.mark.parametrize("name", COMPOSED)
def test_what_torch_composes_is_what_reaches_the_kernels(name: str) -> None:
    function, inputs, expected = COMPOSED[name]
    assert operators(decomposed(function, *inputs))[: len(expected)] == expected


def test_attention_with_a_mask_of_truth_adds_one_of_numbers() -> None:
    mask = torch.rand(6, 6) > 0.3
    after = decomposed(lambda q, m: F.scaled_dot_product_attention(q, q, q, m), Q, mask)
    assert operators(after)[-2:] == ["where", "_scaled_dot_product_flash_attention_for_cpu"]


def test_attention_with_dropout_and_random_operators_stay() -> None:
    builder = Builder()
    q = builder.input("q", (2, 4, 6, 8))
    y = builder.call("aten.scaled_dot_product_attention.default", q, q, q, dropout_p=0.5)
    z = builder.call("aten.dropout.default", y, 0.5, True)
    graph = builder.finish(z)
    assert operators(decompose(graph)) == ["scaled_dot_product_attention", "dropout"]
    assert not is_composed("aten.dropout.default")


def test_an_output_that_is_an_input_stays_one() -> None:
    after = decomposed(lambda x: F.dropout(x, 0.5, False), X)
    assert after.nodes == []
    assert after.outputs == after.inputs


def test_equal_layers_are_recorded_once() -> None:
    composites = Composites()
    recorded: list[object] = []
    record = composites._record
    composites._record = lambda *call: (recorded.append(call), record(*call))[1]  # type: ignore

    def layers(x: torch.Tensor) -> torch.Tensor:
        for _ in range(5):
            x = F.layer_norm(x, [4]).softmax(-1)
        return x

    after = decompose(captured(layers, X), composites=composites)
    assert operators(after) == ["native_layer_norm", "_softmax"] * 5
    assert len(recorded) == 2


@pytest.mark.parametrize("row", KINDS, ids=lambda row: row.name)
def test_a_row_of_a_composed_operator_names_one_of_its_parts(row: KernelRow) -> None:
    """The operator comes apart before rows are asked: a row that names no part would never run."""
    named = [op for op in row.from_aten if op.startswith("aten.")]
    composed = {op for op in named if is_composed(op)}
    assert not composed or set(named) - composed, (
        f"{', '.join(sorted(composed))} comes apart (`Composites`) before the row of {row.name} is "
        "asked; name what it comes apart into, or give it a rule in `decompose.RULES`"
    )
