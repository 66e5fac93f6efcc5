import pytest
import torch

from shardwright.errors import GraphError
from shardwright.ir import Builder, IRGraph


def test_values_and_nodes_share_one_count_of_ids():
    graph = IRGraph("g")
    x = graph.new_value("x", (2,), "f32", role="input")
    y = graph.new_value("y", (2,), "f32")
    node = graph.emit("aten.relu.default", [x.id], [y.id])
    assert (x.id, y.id, node.id, graph.fresh_id()) == (0, 1, 2, 3)
    assert (y.producer, x.users, y.users) == (2, [2], [])
    assert graph.node_by_id() == {2: node}


def test_a_name_that_is_taken_gets_the_smallest_free_number():
    graph = IRGraph("g")
    wanted = ["x", "x", "x__2", "x", "x", "x__1", ""]
    names = [graph.new_value(name, (), "f32").name for name in wanted]
    assert names == ["x", "x__1", "x__2", "x__3", "x__4", "x__1__1", ""]


def test_a_node_is_listed_once_by_what_it_reads_twice():
    graph = IRGraph("g")
    x, y = graph.new_value("x", (2,), "f32"), graph.new_value("y", (2,), "f32")
    node = graph.emit("aten.mul.Tensor", [x.id, x.id], [y.id])
    assert x.users == [node.id]


def test_what_does_not_belong_is_refused():
    graph = IRGraph("g")
    x = graph.new_value("x", (2,), "f32")
    graph.emit("Marker", [], [x.id])
    with pytest.raises(GraphError, match="%x already has a producer"):
        graph.emit("Marker", [], [x.id])
    with pytest.raises(GraphError, match="Marker: the graph 'g' has no value 7"):
        graph.emit("Marker", [7], [])
    with pytest.raises(GraphError, match="value %z has 1 strides for 2 sizes"):
        graph.new_value("z", (2, 3), "f32", strides=(1,))


def test_equality_looks_at_the_graph_and_not_at_contents():
    def build(contents: torch.Tensor) -> IRGraph:
        builder = Builder("g")
        weight = builder.param("w", contents)
        return builder.finish(builder.call("aten.relu.default", weight))

    assert build(torch.zeros(2)) == build(torch.ones(2))
    assert build(torch.zeros(2)) != build(torch.zeros(3))


def test_output_names_are_those_of_the_structure():
    builder = Builder("g")
    x = builder.input("x", (2,))
    graph = builder.finish([x, x])
    assert graph.output_names == ["output_0", "output_1"]
    graph.out_structure = None
    assert graph.output_names == ["x", "x"]
