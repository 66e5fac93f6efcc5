from __future__ import annotations

import gc

import pytest
import torch

from shardwright.errors import GraphError
from shardwright.ir import SLOT, Builder, Input, IRGraph, Scope, Source, compile_graph
from shardwright.ir.graph import (
    format_attribute,
    format_scopes,
    forward_nodes,
    is_step,
    without_collection,
)


def test_values_and_nodes_share_one_count_of_ids():
    graph = IRGraph("g")
    x = graph.new_value("x", (2,), "f32", role="input")
    y = graph.new_value("y", (2,), "f32")
    node = graph.emit("aten.relu.default", [x.id], [y.id])
    assert (x.id, y.id, node.id, graph.fresh_id()) == (0, 1, 2, 3)
    assert (y.producer, x.users, y.users) == (2, [2], [])
    assert graph.node_by_id() == {2: node}


def test_the_representation_is_a_line():
    graph = IRGraph("g")
    x = graph.new_value("x", (2,), "f32", role="input")
    graph.inputs.append(x.id)
    graph.emit("aten.relu.default", [x.id], [graph.new_value("y", (2,), "f32").id])
    assert repr(graph) == "IRGraph(name='g', inputs=1, nodes=1, outputs=0)"


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


# --- text -----------------------------------------------------------------------------------------


def test_a_graph_reads_at_a_glance():
    builder = Builder("mlp")
    x = builder.input("x", (4, 8), strides=(1, 4), device="cuda:0")
    weight = builder.param("fc.weight", torch.zeros(16, 8), names=("fc.weight", "tied"))
    part = builder.buffer("rows", torch.zeros(4, 16), placements=[(0, 4), (0, 16)])
    with builder.scope("fc", "torch.nn.Linear"), builder.scope("fc.0", "my.Mine"):
        y = builder.emit(
            "aten.linear.default", [x, weight], {"bias": None}, source=Source("mlp.py", 12)
        )
    total = builder.call("aten.add.Tensor", part, y)
    graph = builder.finish([y, total], updates={part.id: total.id})
    assert str(graph) == (
        "graph mlp\n"
        "input %x: f32[4, 8]{1, 4}@cuda:0\n"
        'param %fc.weight: f32[16, 8] = "fc.weight", "tied"\n'
        'buffer %rows: f32[4, 16] = "rows" [0:4, 0:16]\n'
        "in fc:torch.nn.Linear > fc.0:my.Mine\n"
        "  %linear!: f32[4, 16]@cuda:0 = aten.linear.default(%x, %fc.weight, bias=None)"
        "  # mlp.py:12\n"
        "in -\n"
        "  %add!: f32[4, 16] = aten.add.Tensor(%rows, %linear, alpha=1)\n"
        "return %linear, %add\n"
        "update %rows = %add\n"
        'arguments {"parameters":[{"name":"x","kind":"POSITIONAL_OR_KEYWORD",'
        '"value":{"type":"tensor","name":"x","index":0}}]}\n'
        'result {"type":"tuple","items":[{"type":"tensor","name":"output_0","index":0},'
        '{"type":"tensor","name":"output_1","index":1}]}\n'
    )


def test_attributes_read_as_python():
    written = {
        "None": None,
        "-3": -3,
        "1e-05": 1e-05,
        "-inf": float("-inf"),
        "nan": float("nan"),
        "complex(-0.0, inf)": complex(-0.0, float("inf")),
        '"say \\"hi\\""': 'say "hi"',
        "torch.bfloat16": torch.bfloat16,
        "torch.channels_last": torch.channels_last,
        "torch.strided": torch.strided,
        "slot": SLOT,
        "[None, %b, [True]]": [None, Input(1), [True]],
    }
    for text, value in written.items():
        assert format_attribute(value, ["%a", "%b"]) == text


def test_places_without_a_tensor_are_underscores():
    builder = Builder("g")
    x = builder.input("x", (1, 2, 4))
    weight = builder.input("w", (2, 2, 1))
    like = ([1], [0], [1], False, [0], 1)
    mask = [False, True, False]
    _, made, _ = builder.call("aten.convolution_backward.default", x, x, weight, None, *like, mask)
    graph = builder.finish(made)
    line = str(graph).split("\n")[3]
    assert line.startswith("  _, %convolution_backward!: f32[2, 2, 1], _ = aten.convolution_back")


def test_odd_scopes_stand_in_quotes():
    assert format_scopes(()) == "-"
    assert format_scopes((Scope("", "M"), Scope("a:b", "<locals>.M > N"))) == (
        '"":M > "a:b":"<locals>.M > N"'
    )


# --- steps ----------------------------------------------------------------------------------------


STEP = """\
graph step
input %x: f32[2]
input %lr: f64[]
param %w: f32[2] = "w"
state %optimizer.w.momentum_buffer: f32[2] = "optimizer.w.momentum_buffer" zeros
  zero_grad(parameters=["w"], set_to_none=True)
  %mul: f32[2] = aten.mul.Tensor(%x, %w)
  %sum!: f32[] = aten.sum.default(%mul, dtype=None)
  %grad.w: f32[2] = Backward(%sum, parameters=["w"], accumulate=False)
  %norm: f32[] = aten.norm.Scalar(%grad.w, p=2)
  %twice!: f32[] = aten.mul.Scalar(%sum, other=2)
return %sum, %twice
"""


@pytest.fixture
def step() -> IRGraph:
    builder = Builder("step")
    x = builder.input("x", (2,))
    builder.input("lr", (), "f64")
    w = builder.param("w", torch.ones(2))
    builder.zeros("state", "optimizer.w.momentum_buffer", torch.empty(2))
    builder.emit("zero_grad", [], {"parameters": ["w"], "set_to_none": True}, outputs=[])
    loss = builder.call("aten.sum.default", builder.call("aten.mul.Tensor", x, w))
    attrs = {"parameters": ["w"], "accumulate": False}
    gradient = builder.value("grad.w", (2,))
    builder.emit("Backward", [loss], attrs, outputs=[gradient])
    builder.call("aten.norm.Scalar", gradient)
    twice = builder.emit("aten.mul.Scalar", [loss], {"other": 2}, name="twice")
    return builder.finish([loss, twice])


def test_markers_and_state_that_begins_with_zeros_have_their_text(step: IRGraph) -> None:
    assert str(step).startswith(STEP)


def test_forward_nodes_are_those_that_no_marker_comes_before(step: IRGraph) -> None:
    assert is_step(step)
    names = [node.op.split(".")[1] for node in forward_nodes(step)]
    assert names == ["mul", "sum", "mul"]


def test_a_step_does_not_run_by_itself(step: IRGraph) -> None:
    with pytest.raises(GraphError, match=r"sw\.build.*sw\.train"):
        compile_graph(step)


# --- garbage collection that waits ----------------------------------------------------------------


def test_collection_waits_and_goes_on() -> None:
    assert gc.isenabled()
    with without_collection():
        assert not gc.isenabled()
        with without_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_goes_on_after_an_error_and_stays_off_where_it_was_off() -> None:
    with pytest.raises(ValueError, match="inside"), without_collection():
        raise ValueError("inside")
    assert gc.isenabled()
    gc.disable()
    try:
        with without_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
