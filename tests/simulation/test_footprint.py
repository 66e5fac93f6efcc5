"""What supertasks need of memory."""

from __future__ import annotations

import pytest
import torch

from shardwright.ir import Builder, IRGraph, compile_graph
from shardwright.profiling.memory import peak_bytes
from shardwright.simulation.memory import Footprint, OutputMemory, footprint
from tests.graphs import block

ROW = 4 * 64


def layers() -> IRGraph:
    """A view of an activation, the activation itself, and a gradient added to a sum."""
    builder = Builder("layers")
    x = builder.input("x", (8, 64), "f32")
    total = builder.input("total", (64, 64), "f32")
    hidden = builder.call("aten.gelu.default", builder.call("aten.relu.default", x))
    view = builder.call("aten.view.default", hidden, [4, 2, 64])
    turned = builder.call("aten.t.default", x)
    return builder.finish([view, hidden, builder.call("aten.addmm.default", total, turned, hidden)])


def test_views_share_memory_and_what_is_overwritten_is_not_new() -> None:
    graph = layers()
    assert footprint(graph, {}) == Footprint(
        (8 + 64) * ROW,
        (
            OutputMemory(None, 0, 8 * ROW),
            OutputMemory(None, 0, 8 * ROW),
            OutputMemory(None, 1, 64 * ROW),
        ),
    )
    over = {graph.inputs[1]: graph.outputs[2]}
    found = footprint(graph, over)
    assert found.homes[2] == OutputMemory(1)
    assert (found.most, found.left) == (16 * ROW, 8 * ROW), "relu's result dies within"
    fresh = footprint(graph, over, fresh=[1])
    assert fresh.left == 16 * ROW


def test_what_is_read_is_no_memory_of_its_own() -> None:
    builder = Builder("seen")
    x = builder.input("x", (8, 64), "f32")
    graph = builder.finish([builder.call("aten.t.default", x), x])
    assert footprint(graph, {}) == Footprint(0, (OutputMemory(0), OutputMemory(0)))


def test_as_much_as_the_allocator_gives() -> None:
    graph = layers()
    program = compile_graph(graph)
    tensors = [torch.rand(8, 64), torch.rand(64, 64)]
    found = peak_bytes(lambda: program(tensors), torch.device("cpu"))
    expected = footprint(graph, {})
    assert (found.most, found.left) == (expected.most, expected.left)


def test_composite_operators_count_what_they_make_on_the_way() -> None:
    builder = Builder("attention")
    x = builder.input("x", (2, 4, 64), "f64")
    y = block(builder, x, "block", 64)
    graph = builder.finish([y])
    program = compile_graph(graph)
    tensors = [
        torch.rand(graph.values[value].shape, dtype=torch.float64) for value in program.arguments
    ]
    found = peak_bytes(lambda: program(tensors), torch.device("cpu"))
    assert footprint(graph, {}).most == pytest.approx(found.most, rel=0.1)
