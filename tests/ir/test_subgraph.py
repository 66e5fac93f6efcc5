from itertools import pairwise

import torch

from shardwright.ir import compile_graph
from shardwright.ir.repeats import repeated_blocks
from shardwright.ir.subgraph import extract
from tests.graphs import language_model, tokens


def test_parts_run_one_after_the_other_are_the_whole():
    graph = language_model(layers=2)
    cuts = [0, *repeated_blocks(graph)[0].cuts, len(graph.nodes)]
    held = {graph.inputs[0]: tokens(), **graph.tensors}
    for start, stop in pairwise(cuts):
        nodes = graph.nodes[start:stop]
        part = extract(graph, nodes, nodes[-1].outputs)
        results = compile_graph(part.graph)([held[value_id] for value_id in part.inputs])
        held |= dict(zip(part.outputs, results, strict=True))
    assert torch.equal(held[graph.outputs[0]], graph.run(tokens()))


def test_what_comes_from_outside_is_an_input_in_order_of_first_use():
    graph = language_model(layers=1)
    part = extract(graph, graph.nodes[2:6], graph.nodes[5].outputs)
    names = [graph.values[value_id].name for value_id in part.inputs]
    assert names == ["mul", "layers.0.norm1.weight", "layers.0.mix.weight"]
    assert [part.graph.values[value_id].role for value_id in part.graph.inputs] == ["input"] * 3
    assert list(part.graph.stored()) == []


def test_a_part_keeps_modules_and_sources():
    graph = language_model(layers=1)
    part = extract(graph, graph.nodes[2:4], graph.nodes[3].outputs)
    assert [node.scope for node in part.graph.nodes] == ["layers.0", "layers.0"]
