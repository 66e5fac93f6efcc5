"""What follows a matrix product becomes part of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from shardwright.compiler.passes.decompose import decompose
from shardwright.compiler.passes.epilogue import fuse_gemms
from shardwright.ir import IRGraph
from tests.compiler.passes.rewritten import calls, captured, operators, rewritten

A, W, BIAS, RESIDUAL = torch.randn(6, 4), torch.randn(4, 5), torch.randn(5), torch.randn(6, 5)


def fused(function: Callable[..., Any], *inputs: torch.Tensor) -> IRGraph:
    graph = decompose(captured(function, *inputs))
    return rewritten(graph, fuse_gemms, inputs, tolerance=1e-6)


FUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "bias": (lambda a, w, b, r: a @ w + b, "gemm(args_0, args_1, args_2) -> add"),
    "residual": (lambda a, w, b, r: r + a @ w, "gemm(args_0, args_1, args_3) -> add"),
    "alpha": (lambda a, w, b, r: a @ w * 0.5, "gemm(args_0, args_1, alpha=0.5) -> mul"),
    "divided": (lambda a, w, b, r: a @ w / 4, "gemm(args_0, args_1, alpha=0.25) -> div"),
    "relu": (lambda a, w, b, r: (a @ w).relu(), "gemm(args_0, args_1, activation=1) -> relu"),
    "gelu": (lambda a, w, b, r: F.gelu(a @ w), "gemm(args_0, args_1, activation=2) -> gelu"),
    "gelu tanh": (
        lambda a, w, b, r: F.gelu(a @ w, approximate="tanh"),
        "gemm(args_0, args_1, activation=3) -> gelu",
    ),
    "silu": (lambda a, w, b, r: F.silu(a @ w), "gemm(args_0, args_1, activation=4) -> silu"),
    "tanh": (lambda a, w, b, r: (a @ w).tanh(), "gemm(args_0, args_1, activation=5) -> tanh"),
    "sigmoid": (
        lambda a, w, b, r: (a @ w).sigmoid(),
        "gemm(args_0, args_1, activation=6) -> sigmoid",
    ),
    "all of it": (
        lambda a, w, b, r: (a @ w * 2 + b + r).relu(),
        "gemm(args_0, args_1, args_2, args_3, activation=1, alpha=2.0) -> relu",
    ),
    "two residuals": (
        lambda a, w, b, r: a @ w + r + r,
        "gemm(args_0, args_1, args_3) -> add; add(add, args_3) -> add_1",
    ),
    "after the activation": (
        lambda a, w, b, r: (a @ w).relu() + r,
        "gemm(args_0, args_1, activation=1) -> relu; add(relu, args_3) -> add",
    ),
    "scaled after the bias": (
        lambda a, w, b, r: (a @ w + b) * 2,
        "gemm(args_0, args_1, args_2) -> add; mul(add, other=2) -> mul",
    ),
    "added with a factor": (
        lambda a, w, b, r: torch.add(r, a @ w, alpha=2),
        "gemm(args_0, args_1) -> matmul; add(args_3, matmul, alpha=2) -> add",
    ),
    "added to itself": (
        lambda a, w, b, r: (lambda y: y + y)(a @ w),
        "gemm(args_0, args_1) -> matmul; add(matmul, matmul) -> add",
    ),
    "divided by zero": (
        lambda a, w, b, r: (a @ w / 0.0).isnan(),
        "gemm(args_0, args_1) -> matmul; div(matmul, other=0.0) -> div; isnan(div) -> isnan",
    ),
}


@pytest.mark.parametrize("name", FUSED)
def test_what_follows(name: str) -> None:
    function, expected = FUSED[name]
    assert "; ".join(calls(fused(function, A, W, BIAS, RESIDUAL))) == expected


def test_a_sum_of_two_products_takes_one_in() -> None:
    after = fused(lambda a, w: a @ w + (2 * a) @ w, A, W)
    assert operators(after) == ["mul", "gemm", "gemm"]


def test_what_others_read_stays_apart() -> None:
    def both(a: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = a @ w
        return y.relu(), y.sum()

    assert operators(fused(both, A, W)) == ["gemm", "relu", "sum"]

    def returned(a: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = a @ w
        return y, y.relu()

    assert operators(fused(returned, A, W)) == ["gemm", "relu"]


def test_views_of_the_rows_may_stand_between() -> None:
    def after_view(a: torch.Tensor, w: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        return torch.tanh((a @ w).view(2, 3, 5) + r)

    after = fused(after_view, A, W, RESIDUAL.view(2, 3, 5))
    assert calls(after) == [
        "view(args_2) -> args_2__1",
        "gemm(args_0, args_1, args_2__1, activation=5) -> matmul__1",
        "view(matmul__1) -> tanh",
    ]


def test_views_of_the_columns_may_not() -> None:
    after = fused(lambda a, w: (a @ w).view(5, 6).relu(), A, W)
    assert operators(after) == ["gemm", "view", "relu"]


def test_a_residual_that_lies_in_another_way_stays_apart() -> None:
    after = fused(lambda a, w, r: (a @ w + r.t()).contiguous(), A, W, torch.randn(5, 6))
    assert operators(after) == ["gemm", "t", "add"]


def test_halves_are_rounded_where_they_are_stored() -> None:
    a, w = A.bfloat16(), W.bfloat16()
    assert operators(fused(lambda a, w: (a @ w).relu(), a, w)) == ["gemm", "relu"]
