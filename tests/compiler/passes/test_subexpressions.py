"""What is computed twice is computed once, and what nobody needs not at all."""

from __future__ import annotations

import torch

from shardwright.compiler.passes.simplify import merge_common_subexpressions, remove_dead_code
from shardwright.ir import Builder
from tests.compiler.passes.rewritten import captured, operators, rewritten

X = torch.randn(3, 4)


def test_equal_calls_are_done_once() -> None:
    graph = captured(lambda x: x.exp().sum(0) + x.exp().sum(0) * x.exp().sum(1).sum(), X)
    after = rewritten(graph, merge_common_subexpressions, [X])
    assert operators(after) == ["exp", "sum", "sum", "sum", "mul", "add"]


def test_attributes_make_a_difference() -> None:
    graph = captured(lambda x: (x + 1).long() + (x + 1.0).long() + (x + True).long(), X)
    assert operators(rewritten(graph, merge_common_subexpressions, [X])).count("add") == 5


def test_outputs_and_updates_may_be_one_value() -> None:
    builder = Builder()
    x, total = builder.input("x", (3,)), builder.buffer("total", torch.zeros(3))
    first = builder.call("aten.add.Tensor", total, x)
    second = builder.call("aten.add.Tensor", total, x)
    graph = builder.finish([first, second], updates={total.id: second.id})
    after = rewritten(graph, merge_common_subexpressions, [torch.ones(3)])
    assert operators(after) == ["add"]
    assert after.outputs[0] == after.outputs[1] == after.updates[total.id]


def test_random_numbers_are_drawn_as_often_and_memory_is_taken_as_often() -> None:
    builder = Builder()
    x = builder.input("x", (3,))
    made = [builder.call("aten.rand_like.default", x) for _ in range(2)]
    made += [builder.call("aten.empty_like.default", x) for _ in range(2)]
    graph = builder.finish(made)
    assert len(merge_common_subexpressions(graph).nodes) == 4


def test_what_nobody_needs_goes() -> None:
    builder = Builder()
    x, unused = builder.input("x", (3,)), builder.param("unused", torch.ones(3))
    y = builder.call("aten.exp.default", x)
    builder.call("aten.add.Tensor", builder.call("aten.exp.default", y), unused)
    builder.call("aten.rand_like.default", x)
    graph = builder.finish(y)
    after = remove_dead_code(graph)
    assert operators(after) == ["exp", "rand_like"]
    assert [value.name for value in after.stored()] == ["unused"]
    assert not after.values[unused.id].users
