import torch

from shardwright.autodiff.needed import needing_gradients, trained_parameters
from shardwright.ir import Builder
from tests.steps import language_step


def test_a_step_trains_what_its_optimizer_replaces():
    graph = language_step()
    parameters = {value.id for value in graph.stored() if value.role == "param"}
    assert trained_parameters(graph) == parameters
    frozen = min(parameters)
    del graph.updates[frozen]
    assert trained_parameters(graph) == parameters - {frozen}


def test_gradients_go_through_what_is_real_and_not_detached():
    builder = Builder("model")
    weight = builder.param("w", torch.ones(4))
    counts = builder.param("n", torch.ones(4, dtype=torch.int64))
    x = builder.input("x", (4,), "f32")
    aside = builder.call("aten.relu.default", x)
    made = builder.call("aten.mul.Tensor", aside, weight)
    whole = builder.call("aten.to.dtype", made, torch.int64)
    apart = builder.call("aten.detach.default", made)
    after = builder.call("aten.relu.default", apart)
    last = builder.call("aten.add.Tensor", made, after)
    graph = builder.graph
    assert trained_parameters(graph) == {weight.id}
    assert counts.id not in needing_gradients(graph, trained_parameters(graph))
    assert needing_gradients(graph, {weight.id}) == {weight.id, made.id, last.id}
    assert whole.id not in needing_gradients(graph, {weight.id})
    assert needing_gradients(graph, ()) == set()
