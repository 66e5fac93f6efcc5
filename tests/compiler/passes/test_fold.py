"""What is the same in every run is computed once."""

from __future__ import annotations

import torch

from shardwright.compiler.passes.simplify import fold_constants
from shardwright.ir import Builder, IRGraph
from tests.compiler.passes.rewritten import captured, operators, rewritten

X = torch.randn(3, 4)


def inference(graph: IRGraph) -> IRGraph:
    return fold_constants(graph, inference=True)


def constants(graph: IRGraph) -> list[str]:
    return [value.name for value in graph.values.values() if value.role == "constant"]


def test_what_depends_on_nothing_is_a_constant() -> None:
    graph = captured(lambda x: x + torch.arange(4).float() * 2, X)
    after = rewritten(graph, fold_constants, [X])
    assert operators(after) == ["add"]
    assert len(constants(after)) == 1


def test_weights_are_folded_in_inference_alone() -> None:
    layer = torch.nn.Linear(4, 4)
    graph = captured(lambda self, x: x * (1 + self.layer.weight[:1]), X, layer=layer)
    assert operators(rewritten(graph, fold_constants, [X])) == ["slice", "add", "mul"]
    assert operators(rewritten(graph, inference, [X])) == ["mul"]


def test_a_transposed_weight_is_a_view_and_stays_one() -> None:
    layer = torch.nn.Linear(4, 4, bias=False)
    graph = captured(lambda self, x: x @ self.layer.weight.t(), X, layer=layer)
    after = rewritten(graph, inference, [X])
    assert operators(after) == ["t", "matmul"]
    assert constants(after) == []


def test_views_of_constants_stay_views() -> None:
    graph = captured(lambda x: x + torch.ones(4).expand(3, 4), X)
    after = rewritten(graph, fold_constants, [X])
    assert operators(after) == ["expand", "add"]
    assert after.values[after.nodes[0].inputs[0]].shape == (4,)


def test_large_results_are_not_kept() -> None:
    table = torch.nn.Embedding(1024, 512)
    rows = torch.zeros(2048, dtype=torch.int64)
    graph = captured(lambda self, x: self.table(rows) + x, torch.ones(1), table=table)
    assert "embedding" in operators(rewritten(graph, inference, [torch.ones(1)]))


def test_what_an_update_changes_is_no_constant() -> None:
    builder = Builder()
    total = builder.constant("total", torch.zeros(3))
    after = builder.call("aten.add.Tensor", total, 1)
    graph = builder.finish(after, updates={total.id: after.id})
    assert operators(rewritten(graph, inference, [])) == ["add"]


def test_random_numbers_are_drawn_in_every_run() -> None:
    builder = Builder()
    noise = builder.call("aten.rand_like.default", builder.constant("like", torch.zeros(3)))
    assert operators(fold_constants(builder.finish(noise))) == ["rand_like"]


def test_an_output_may_be_a_constant() -> None:
    builder = Builder()
    builder.input("x", (3,))
    graph = builder.finish(builder.call("aten.full.default", [2], 1.5))
    after = rewritten(graph, fold_constants, [torch.ones(3)])
    assert after.nodes == []
    assert len(constants(after)) == 1
