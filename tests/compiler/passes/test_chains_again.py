"""What a chain makes for later ones alone is done again by these, where that is cheap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright.compiler.passes.decompose import decompose
from shardwright.compiler.passes.pointwise import LONGEST, fuse_pointwise
from tests.compiler.passes.rewritten import captured, programs, rewritten

X, Y = torch.randn(3, 4), torch.rand(3, 4) + 0.5


def fused(function: Callable[..., Any], *inputs: Tensor) -> list[str]:
    graph = decompose(captured(function, *inputs))
    return programs(rewritten(graph, fuse_pointwise, inputs))


def around(first: Callable[[Tensor], tuple[Tensor, ...]]) -> Callable[[Tensor], Tensor]:
    """What ``first`` makes, its last result summed, and all of it read after the sum."""

    def run(x: Tensor) -> Tensor:
        *kept, last = first(x)
        total = last.sum(-1, keepdim=True)
        for item in kept:
            total = total * item
        return total * x

    return run


CASES: dict[str, tuple[Callable[[Tensor], tuple[Tensor, ...]], list[str]]] = {
    "cheap steps are done again": (
        lambda x: (y := x * 2, (y + 1).tanh()),
        ["mul x0 2.0; add %0 1.0; tanh %1 -> %2", "mul x0 2.0; mul x1 %0; mul %1 x0 -> %2"],
    ),
    "slow ones are kept": (
        lambda x: (y := x.exp(), (y + 1).tanh()),
        ["exp x0; add %0 1.0; tanh %1 -> %0 %2", "mul x0 x1; mul %0 x2 -> %1"],
    ),
    "what follows a slow one is done again of it": (
        lambda x: (y := x.exp(), z := y * 3, z.tanh()),
        [
            "exp x0; mul %0 3.0; tanh %1 -> %0 %2",
            "mul x0 3.0; mul x1 x0; mul %1 %0; mul %2 x2 -> %3",
        ],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_programs(name: str) -> None:
    first, expected = CASES[name]
    assert fused(around(first), X) == expected


def test_not_where_it_would_keep_something_else() -> None:
    """Of the product's factors one is read by nobody later."""

    def run(x: Tensor, y: Tensor) -> Tensor:
        z = y.relu().sum(0, keepdim=True).expand(3, 4).contiguous()
        product = x * z
        return product.tanh().sum(-1, keepdim=True) * product

    assert "mul x0 x1; tanh %0 -> %0 %1" in fused(run, X, Y)


def test_not_where_others_read_it_too() -> None:
    def run(x: Tensor) -> Tensor:
        double = x * 2
        return double.tanh().sum(-1, keepdim=True) * double + double.sum()

    assert fused(run, X)[0] == "mul x0 2.0; tanh %0 -> %0 %1"


def test_not_where_the_chain_would_grow_too_long() -> None:
    def run(x: Tensor) -> Tensor:
        double = x * 2
        made = double.tanh().sum(-1, keepdim=True) * double
        for i in range(LONGEST - 1):
            made = made * (1 + i / 100)
        return made

    first, *others = fused(run, X)
    assert first == "mul x0 2.0; tanh %0 -> %0 %1"
    assert [len(program.split(";")) for program in others] == [LONGEST]


def test_a_chain_of_which_nothing_is_kept_is_gone() -> None:
    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        double = x * 2 + 1
        total = x.sum(-1, keepdim=True)
        return double * total, double[:, :1].exp()

    found = fused(lambda x: run(x)[0], X)
    assert len(found) == 1


def test_halves_that_are_stored_are_rounded() -> None:
    found = fused(around(lambda x: (y := x * 2, (y + 1).tanh())), X.bfloat16())
    assert all(len(program.split(";")) == 1 for program in found)
