"""What nobody needs is dropped; what draws random numbers or checks something stays."""

from typing import Any

import torch
from torch.nn import functional

from shardwright.ir import Builder
from shardwright.ir.graph import remove_dead_code
from tests.tracing.equality import captured, operators


def test_unused_nodes_and_values_go() -> None:
    builder = Builder()
    x, unused = builder.input("x", (2,)), builder.input("unused", (2,))
    weight = builder.param("weight", torch.ones(2))
    y = builder.call("aten.relu.default", x)
    builder.call("aten.mul.Tensor", y, weight)
    remove_dead_code(builder.graph, [y.id])
    graph = builder.finish(y)
    assert [node.op for node in graph.nodes] == ["aten.relu.default"]
    assert [value.name for value in graph.values.values()] == ["x", "unused", "relu"]
    assert not graph.tensors
    assert unused.name == "unused"


def test_random_numbers_and_assertions_stay() -> None:
    def function(m: Any, x: Any) -> Any:
        torch.rand(3)
        torch._assert_async(x.sum() > -1000)
        x.relu()
        return x + 1

    graph = captured(function, torch.ones(2))
    assert operators(graph) == ["rand", "sum", "gt", "_assert_async", "add"]


def test_attention_without_dropout_draws_nothing_and_goes() -> None:
    def function(m: Any, x: Any) -> Any:
        functional.scaled_dot_product_attention(x, x, x)
        functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1)
        functional.dropout(x, 0.0, training=True)
        return x + 1

    graph = captured(function, torch.ones(2, 3, 4))
    assert operators(graph) == ["scaled_dot_product_attention", "add"]
    assert graph.nodes[0].attrs["dropout_p"] == 0.1
