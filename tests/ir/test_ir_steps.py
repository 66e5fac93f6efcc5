import pytest
import torch

from shardwright.errors import GraphError
from shardwright.ir import Builder, IRGraph, compile_graph
from shardwright.ir.graph import forward_nodes, is_step

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
