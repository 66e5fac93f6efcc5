"""Writing a graph anew."""

from __future__ import annotations

import pytest
import torch

from shardwright.compiler.passes.rewriter import (
    Rewriter,
    Tensor,
    bound,
    call_attributes,
    same_layout,
)
from shardwright.errors import GraphError
from shardwright.ir import IRGraph, format_graph, validate
from tests.compiler.passes.rewritten import captured, operators

X = torch.randn(3, 4)


def copied(graph: IRGraph) -> Rewriter:
    rewriter = Rewriter(graph)
    for node in graph.nodes:
        rewriter.keep(node)
    return rewriter


def test_keeping_every_node_is_a_copy() -> None:
    graph = captured(lambda x: x.t().exp().split(1), X)
    after = copied(graph).finish()
    validate(after)
    assert format_graph(after) == format_graph(graph)
    assert all(after.values[i] is not graph.values[i] for i in graph.values)


def test_what_stands_for_a_value_must_lie_alike() -> None:
    rewriter = copied(captured(lambda x: (x.exp(), x.t().exp()), X))
    first, transposed, second = (node.outputs[0] for node in rewriter.source.nodes)
    with pytest.raises(GraphError, match="cannot stand for"):
        rewriter.replace(first, second)
    assert transposed != first


def test_a_replaced_output_is_another_value() -> None:
    graph = captured(lambda x: x.exp().exp(), X)
    rewriter = Rewriter(graph)
    first, second = graph.nodes
    rewriter.keep(first)
    rewriter.replace(second.outputs[0], first.outputs[0])
    after = rewriter.finish()
    validate(after)
    assert after.outputs == first.outputs
    assert after.values[first.outputs[0]].role == "output"


def test_fresh_values_that_nobody_makes_are_left_out() -> None:
    rewriter = copied(captured(lambda x: x.exp(), X))
    rewriter.fresh(rewriter.of(rewriter.source.outputs[0]))
    validate(rewriter.finish())


def test_arguments_there_and_back() -> None:
    attrs = {"alpha": 2}
    given = bound("aten.add.Tensor", [5, 7], attrs)
    assert given == {"self": 5, "other": 7, "alpha": 2}
    assert isinstance(given["self"], Tensor)
    assert call_attributes("aten.add.Tensor", given) == ([5, 7], attrs)


def test_dimensions_of_one_element_may_lie_anywhere() -> None:
    graph = captured(lambda x: (x[:1].t(), x[:1].reshape(4, 1)), X)
    a, b = (graph.values[value_id] for value_id in graph.outputs)
    assert same_layout(a, b)
    assert operators(graph)[0] == "slice"
