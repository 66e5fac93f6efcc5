"""Gradients of inputs are computed apart from those of weights."""

import torch

from shardwright.autodiff.backward import split_backward
from shardwright.autodiff.differentiate import Differentiator
from shardwright.ir import Builder, IRGraph, IRNode, IRValue, validate
from tests.building.derivatives import distance, run


class Layers:
    """A convolution, a norm and a linear layer, with gradients of their input and weights."""

    def __init__(self) -> None:
        self.builder = builder = Builder()
        self.x = builder.input("x", (2, 3, 6, 6), "f64")
        weights = [(4, 3, 3, 3), (4,), (4,), (5, 4)]
        self.weights = [builder.input(f"w{i}", shape, "f64") for i, shape in enumerate(weights)]
        kernel, scale, bias, matrix = self.weights
        y = builder.call("aten.conv2d.default", self.x, kernel, bias)
        y = builder.call("aten.mean.dim", y, [2, 3])
        y = builder.call("aten.layer_norm.default", y, [4], scale)
        y = builder.call("aten.linear.default", y, matrix)
        seed = builder.input("seed", y.shape, "f64")
        nodes = list(builder.graph.nodes)
        differentiator = Differentiator(builder)
        wants = [self.x.id, *(weight.id for weight in self.weights)]
        self.found = differentiator.backward(nodes, {y.id: seed}, wants)
        self.nodes = list(builder.graph.nodes[len(nodes) :])
        differentiator.exchange()

    def gradient(self, value: IRValue) -> IRValue:
        return self.found[value.id]

    def finish(self, early: list[IRNode], late: list[IRNode]) -> IRGraph:
        """The graph with the backward in this order."""
        graph = self.builder.graph
        moved = {node.id for node in self.nodes}
        forward = [node for node in graph.nodes if node.id not in moved]
        graph.nodes[:] = [*forward, *early, *late]
        for node in (*early, *late):
            for value_id in node.outputs:
                graph.values[value_id].producer = node.id
        return self.builder.finish(list(self.found.values()))


def operators(nodes: list[IRNode]) -> list[str]:
    return [node.op.split(".")[1] for node in nodes]


def test_what_others_wait_for_comes_first():
    layers = Layers()
    wanted = {layers.gradient(layers.x).id}
    early, late = split_backward(layers.builder.graph, layers.nodes, wanted)
    assert "native_layer_norm_backward" in operators(early), "one pass gives both"
    assert operators(late).count("mm") == 1
    assert not wanted & {value_id for node in late for value_id in node.outputs}


def test_a_convolution_is_run_twice_with_masks_that_share_nothing():
    layers = Layers()
    wanted = {layers.gradient(layers.x).id}
    early, late = split_backward(layers.builder.graph, layers.nodes, wanted)
    (first,) = (node for node in early if "convolution" in node.op)
    (second,) = (node for node in late if "convolution" in node.op)
    assert first.attrs["output_mask"] == [True, False, False]
    assert second.attrs["output_mask"] == [False, True, True]
    assert first.results == [layers.gradient(layers.x).id, None, None]
    assert second.id != first.id


def test_the_numbers_are_the_same_in_either_order():
    layers = Layers()
    given = [
        torch.randn(layers.builder.graph.values[v].shape, dtype=torch.float64)
        for v in layers.builder.graph.inputs
    ]
    whole = Layers()
    expected = run(whole.finish(whole.nodes, []), given)
    wanted = {layers.gradient(layers.x).id}
    graph = layers.finish(*split_backward(layers.builder.graph, layers.nodes, wanted))
    validate(graph)
    for found, expectation in zip(run(graph, given), expected, strict=True):
        assert distance(found, expectation) <= 1e-12


def test_nothing_early_and_everything_early():
    layers = Layers()
    graph, nodes = layers.builder.graph, layers.nodes
    assert split_backward(graph, nodes, ()) == ([], nodes)
    every = {gradient.id for gradient in layers.found.values()}
    assert split_backward(graph, nodes, every) == (nodes, [])
