"""Nodes are done together only where that holds no more than doing each by itself."""

from __future__ import annotations

import torch

from shardwright.compiler.passes.pointwise import fuse_pointwise
from shardwright.compiler.passes.pointwise_memory import LivenessBound
from shardwright.ir import Builder, IRGraph, IRValue
from tests.compiler.passes.rewritten import operators, programs, rewritten

WIDE = 1000


def most(graph: IRGraph) -> int:
    """The bytes that a graph's nodes hold at once, at most, beside inputs and stored values."""
    return LivenessBound(graph).most


def sums(*, late: bool) -> tuple[IRGraph, list[torch.Tensor]]:
    """A sum of four wide values, each made of a row just before it is added, or all ahead."""
    builder = Builder()
    rows = [builder.input(f"x{i}", (1, WIDE)) for i in range(4)]

    def wide(row: IRValue) -> IRValue:
        (made,) = (builder.call("aten.cat.default", [row] * 8, 0),)
        assert isinstance(made, IRValue)
        return made

    ahead = [] if late else [wide(row) for row in rows]
    total = wide(rows[0]) if late else ahead[0]
    for i in range(1, 4):
        total = builder.call("aten.add.Tensor", total, wide(rows[i]) if late else ahead[i])
    return builder.finish([total]), [torch.randn(1, WIDE) for _ in rows]


def test_a_sum_does_not_wait_for_its_last_part() -> None:
    graph, inputs = sums(late=True)
    after = rewritten(graph, fuse_pointwise, inputs)
    assert programs(after) == []
    assert most(after) == most(graph) == 3 * 8 * WIDE * 4


def test_it_does_where_all_parts_are_there_anyway() -> None:
    graph, inputs = sums(late=False)
    after = rewritten(graph, fuse_pointwise, inputs)
    assert programs(after) == ["add x0 x1; add %0 x2; add %1 x3 -> %2"]
    assert operators(after).count("cat") == 4
    assert most(after) <= most(graph)


def test_what_is_held_and_for_how_long() -> None:
    builder = Builder()
    x = builder.input("x", (4,))
    a = builder.call("aten.exp.default", x)
    seen = builder.call("aten.view.default", a, [2, 2])
    b = builder.call("aten.tanh.default", a)
    c = builder.call("aten.sum.default", seen)
    graph = builder.finish([b, c])
    assert list(LivenessBound(graph).held) == [16, 16, 32, 36]
