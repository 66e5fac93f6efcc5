"""Functions that write nodes themselves, in a graph of their own and inside a step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.tracing.active import LiveGraph, get_ir, is_tracing
from tests.tracing.stepping import unchanged_capture


def test_a_graph_is_written_inside_the_block_only() -> None:
    ir = sw.IRGraph("own")
    assert not is_tracing()
    with sw.tracing(ir):
        assert is_tracing()
        assert get_ir() is ir
        x, y = (get_ir().new_value(name, (2,), "f32") for name in "xy")
        get_ir().emit("twice", [x.id], [y.id], {"by": 2})
    assert not is_tracing()
    assert [node.op for node in ir.nodes] == ["twice"]
    with pytest.raises(sw.GraphError, match="is_tracing"):
        get_ir()


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The seed's functional operator, which writes its node where it is traced."""
    ir = get_ir()
    assert isinstance(ir, LiveGraph)
    assert ir.value_of(x) is ir.value_of(x)
    y = ir.new_value("y", (*x.shape[:-1], weight.shape[0]), "f32")
    inputs = [ir.value_of(x).id, ir.value_of(weight).id]
    ir.emit("aten.linear.default", inputs, [y.id], {"bias": None})
    return ir.tensor_of(y)


def noted(loss: torch.Tensor) -> torch.Tensor:
    ir = get_ir()
    assert isinstance(ir, LiveGraph)
    level = ir.new_value("level", (), "f32")
    ir.emit("note", [ir.value_of(loss).id], [level.id], {"every": 10, "sizes": (1, 2)})
    return ir.tensor_of(level)


def step_with(function: Callable[..., Any]) -> Callable[..., Any]:
    model = nn.Linear(3, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss, more = function(x, model.weight)
        loss.backward()
        optimizer.step()
        return loss, more

    return step


def test_nodes_stand_in_the_step_where_they_were_emitted() -> None:
    def function(x: torch.Tensor, weight: torch.Tensor) -> Any:
        loss = linear(x, weight).mean()
        return loss, noted(loss) * 2

    graph = unchanged_capture(step_with(function), (torch.ones(4, 3),)).graph
    ops = [node.op for node in graph.nodes]
    assert ops == [
        "zero_grad",
        "aten.linear.default",
        "aten.mean.default",
        "note",
        "aten.mul.Tensor",
        "Backward",
        "sgd_step",
    ]
    assert graph.nodes[3].attrs == {"every": 10, "sizes": [1, 2]}
    assert graph.nodes[5].attrs["parameters"] == ["weight"]


@pytest.mark.parametrize(
    ("shape", "message"), [((4, 3), "declared as"), (None, "2 outputs are given")]
)
def test_outputs_that_an_operator_does_not_make(shape: Any, message: str) -> None:
    def function(x: torch.Tensor, weight: torch.Tensor) -> Any:
        ir = get_ir()
        assert isinstance(ir, LiveGraph)
        outputs = [ir.new_value("y", shape or (4, 2), "f32").id for _ in range(1 if shape else 2)]
        inputs = [ir.value_of(x).id, ir.value_of(weight).id]
        ir.emit("aten.linear.default", inputs, outputs, {"bias": None})
        return None

    with pytest.raises(sw.CaptureError, match=message):
        sw.compile_ir(step_with(function), torch.ones(4, 3))


def test_an_ordinary_step_is_refused_before_anything_changes() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight = model.weight.detach().clone()
    model.weight.grad = torch.ones_like(weight)

    def step(clear: bool) -> None:
        if clear:
            optimizer.zero_grad()
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()

    for clear, name in ((True, "zero_grad"), (False, r"backward\(\)")):
        with (
            pytest.raises(sw.GraphError, match=rf"{name}.*compile_ir"),
            sw.tracing(sw.IRGraph("x")),
        ):
            step(clear)
    assert torch.equal(model.weight, weight)
    assert torch.equal(model.weight.grad, torch.ones_like(weight))
    assert not is_tracing()
