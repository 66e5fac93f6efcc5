"""The backward of a custom Function, which an attribute names by its text."""

import pytest
import torch

from shardwright.errors import GraphError
from shardwright.ir import Builder
from shardwright.ir.with_backward import (
    backward_graph,
    identity_backward,
    name_backward,
    with_backward,
)


def test_a_backward_that_gives_what_it_is_given() -> None:
    builder = Builder("any")
    graph = backward_graph(identity_backward(builder.input("x", (2, 3), strides=(1, 2))))
    assert (graph.inputs, graph.nodes) == (graph.outputs, [])


def test_the_name_is_the_text() -> None:
    builder = Builder("backward")
    g, s = builder.input("g", (2,)), builder.input("s", (2,))
    graph = builder.finish([builder.call("aten.mul.Tensor", g, s)])
    name = name_backward(graph)
    assert name == (
        "graph backward\ninput %g: f32[2]\ninput %s: f32[2]\n"
        "  %mul!: f32[2] = aten.mul.Tensor(%g, %s)\nreturn %mul\n"
    )
    assert backward_graph(name) is graph
    x, saved = torch.ones(2, requires_grad=True), torch.tensor([2.0, 3.0])
    (made,) = with_backward([x.detach()], [x], [saved], "Own", name, True, "")
    made.sum().backward()
    assert torch.equal(x.grad, saved)


def test_a_backward_of_another_process_is_refused() -> None:
    with pytest.raises(GraphError, match="capture the program here"):
        backward_graph("graph backward\ninput %g: f32[7]\nreturn %g\n")
