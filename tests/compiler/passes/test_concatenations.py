"""Concatenations in the order in which they are read."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.compiler.passes.decompose import decompose
from shardwright.compiler.passes.simplify import order_concatenations
from shardwright.ir import IRGraph
from tests.compiler.passes.rewritten import captured, operators, rewritten

X, Y = torch.randn(2, 3, 4), torch.randn(2, 3, 4)


def stacked(order: list[int], dim: int) -> IRGraph:
    """A stack that is copied in another order, after the pass."""

    def copy(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        whole = torch.stack([x, y], dim).permute(order)
        return whole.clone(memory_format=torch.contiguous_format)

    return rewritten(decompose(captured(copy, X, Y)), order_concatenations, [X, Y])


@pytest.mark.parametrize(
    ("order", "dim"), [([1, 0, 2, 3], 0), ([3, 2, 1, 0], 0), ([1, 0, 2, 3], 1)]
)
def test_a_stack_is_copied_once(order: list[int], dim: int) -> None:
    assert operators(stacked(order, dim)) == ["unsqueeze"] * 2 + ["permute"] * 2 + ["cat"]


@settings(max_examples=25, deadline=None)
@given(st.permutations(range(4)), st.integers(-4, 3))
def test_any_order_computes_the_same(order: list[int], dim: int) -> None:
    after = stacked(order, dim)
    assert operators(after).count("cat") == 1


def test_what_others_read_stays() -> None:
    def both(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        whole = torch.cat([x, y], 0)
        return whole.permute(1, 0, 2).contiguous(), whole

    graph = decompose(captured(both, X, Y))
    assert order_concatenations(graph) is graph
