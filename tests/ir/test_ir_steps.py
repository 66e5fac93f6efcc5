import pytest

from shardwright.errors import GraphError
from shardwright.ir import compile_graph, parse_graph
from shardwright.ir.steps import forward_nodes, is_step

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


def test_markers_and_state_that_begins_with_zeros_keep_their_text() -> None:
    graph = parse_graph(STEP)
    assert str(graph).startswith(STEP)
    assert parse_graph(str(graph)) == graph


def test_forward_nodes_are_those_that_no_marker_comes_before() -> None:
    graph = parse_graph(STEP)
    assert is_step(graph)
    names = [node.op.split(".")[1] for node in forward_nodes(graph)]
    assert names == ["mul", "sum", "mul"]


def test_a_step_does_not_run_by_itself() -> None:
    with pytest.raises(GraphError, match=r"sw\.build.*sw\.train"):
        compile_graph(parse_graph(STEP))
