"""What a slot holds in simulated time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.clusters.device import CPU_CORE
from shardwright.costs.cost import Analytic, Costs
from shardwright.costs.tasks import TaskTime, TaskTimes
from shardwright.engine.program import slot_program
from shardwright.engine.replacement import MemoryUse
from shardwright.ir import Builder, IRGraph, compile_graph
from shardwright.pipeline.graphs import TaskGraphs
from shardwright.profiling.memory import peak_bytes
from shardwright.simulation.memory import (
    Footprint,
    HeldValues,
    Ledger,
    OutputMemory,
    SimulatedStorage,
    TaskWork,
    footprint,
    hold_constants,
)
from tests.graphs import block
from tests.runtime.linear_step import WIDTH, linear_step


def test_a_storage_lives_as_long_as_a_tensor_lies_there() -> None:
    ledger = Ledger("d0")
    constants, found = HeldValues(ledger), HeldValues(ledger)
    constants["w"] = SimulatedStorage(10, "parameters")
    found["x"] = found["view"] = SimulatedStorage(100, "activations")
    ledger.note(0)
    found.pop("x")
    assert ledger.held["activations"] == 100
    found.pop("view")
    found.pop("view", None)
    assert ledger.held["activations"] == 0
    ledger.note(50)
    assert (ledger.memory().parameters, ledger.memory().activations) == (10, 100)
    assert ledger.memory().total == 110
    ledger.note(150)
    assert (ledger.memory().activations, ledger.memory().temporaries) == (0, 150)


def test_memory_for_messages_is_kept_and_used_again() -> None:
    sender, receiver = Ledger("d0"), Ledger("d1")
    first, second = sender.lend(1000, 1), sender.lend(1000, 1)
    values = HeldValues(receiver)
    for name, lent in (("a", first), ("b", second)):
        values[name] = receiver.see(lent)
    assert sender.held["messages"] == receiver.held["messages"] == 2 * first.nbytes
    values.pop("a")
    assert receiver.held["messages"] == 2 * first.nbytes, "it stays mapped"
    assert sender.lend(1000, 2) is first
    assert sender.lend(1000, 1) not in (first, second)
    assert sender.held["messages"] == 3 * first.nbytes


def test_a_message_to_several_is_held_by_each() -> None:
    sender, receivers = Ledger("d0"), [Ledger(f"d{k}") for k in (1, 2)]
    block = sender.lend(64, 2)
    seen = [receiver.see(block) for receiver in receivers]
    for receiver, storage in zip(receivers, seen, strict=True):
        receiver.hold(storage)
    receivers[0].drop(seen[0])
    assert sender.lend(64, 1) is not block
    receivers[1].drop(seen[1])
    assert sender.lend(64, 1) is block


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=40))
def test_all_that_is_held_can_be_let_go_of(acts: list[tuple[int, int]]) -> None:
    ledger = Ledger("d0")
    storages = [SimulatedStorage(7 * k, "activations") for k in range(4)]
    values = HeldValues(ledger)
    for storage, place in acts:
        values[place] = storages[storage]
        used = {id(storage) for storage in values.values()}
        assert ledger.held["activations"] == sum(s.nbytes for s in storages if id(s) in used)
    values.clear()
    assert set(ledger.held.values()) == {0}


def test_what_constants_are() -> None:
    found = hold_constants(Ledger("d0"), slot_program(linear_step(), "d0"))
    assert {name: (storage.nbytes, storage.item) for name, storage in found.items()} == {
        "w0.0": (8 * WIDTH * WIDTH, "parameters"),
        "g0.0": (8 * WIDTH * WIDTH, "gradients"),
        "m0.0": (8 * WIDTH * WIDTH, "optimizer"),
    }


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


PIPELINE = linear_step()
MATRIX = 8 * WIDTH * WIDTH


def work(costs: Costs | TaskTimes) -> TaskWork:
    return TaskWork(PIPELINE, costs, CPU_CORE, TaskGraphs(PIPELINE))


def test_node_by_node_where_nothing_was_measured() -> None:
    costs = Analytic(CPU_CORE)
    found = work(costs)
    graph = TaskGraphs(PIPELINE).of("U0.0")
    expected = sum(costs.node(graph, node).forward for node in graph.nodes)
    assert found.seconds("U0.0") == pytest.approx(expected)
    assert found.seconds("U0.0") > found.seconds("F0.0") / 10


def test_as_measured() -> None:
    found = work(TaskTimes({"F0.0": TaskTime(1.5, 10_000)}))
    assert found.seconds("F0.0") == 1.5
    kept = found.footprint("F0.0", MemoryUse(), first=False)
    assert kept.most == 10_000 + kept.left


def test_an_accumulator_takes_no_memory_of_its_own() -> None:
    found = work(Analytic(CPU_CORE))
    memory = slot_program(PIPELINE, "d0").memory["W0.0"]
    assert found.footprint("W0.0", memory, first=False).left == 0
    assert found.footprint("W0.0", memory, first=True).left == 0
    assert found.footprint("W0.0", MemoryUse(), first=False).left == MATRIX


def test_what_stands_in_no_file_moves_its_bytes() -> None:
    found = work(Analytic(CPU_CORE))
    assert found.moving("zero", 1000) == pytest.approx(1000 / CPU_CORE.bandwidth)
    assert found.moving("stack", 1000) == 2 * found.moving("zero", 1000)
