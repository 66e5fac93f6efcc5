"""Recorded tasks: on the CPU with a stand-in for the graph, on a GPU with the graph itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch

import shardwright as sw
from shardwright.compiler import cuda_graphs, tasks
from shardwright.compiler.cuda_graphs import GraphMemory, Record
from shardwright.compiler.lowering import lower_graph
from shardwright.compiler.slots import SharedArena
from shardwright.compiler.tasks import TaskProgram, compile_tasks, plan_task
from shardwright.engine.program import slot_program
from shardwright.ir import Builder, IRGraph
from shardwright.kernels.emitters import emit_graph
from shardwright.pipeline import Device
from tests.compiler.stand_in import StandIn
from tests.runtime.linear_step import linear_step
from tests.runtime.test_training_runner import assert_trains

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device"
)
CPU = torch.device("cpu")
BOTH = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu]),
]


def recorder(device: torch.device) -> Record:
    return StandIn().record if device.type == "cpu" else GraphMemory(device).record


def task(
    graph: IRGraph,
    record: Record | None,
    *,
    device: torch.device = CPU,
    constants: Sequence[int] = (),
    donated: Mapping[int, int] | None = None,
) -> TaskProgram:
    lowered = lower_graph(emit_graph(graph))
    return TaskProgram(
        plan_task(lowered, donated),
        device,
        SharedArena(device),
        constants=constants,
        donated=donated,
        record=record,
    )


def weighed() -> IRGraph:
    """relu(x w), and a sum that grows: x, w, total → y, total + y."""
    builder = Builder()
    x, w = builder.input("x", (4, 3), "f32"), builder.input("w", (3, 3), "f32")
    total = builder.input("total", (4, 3), "f32")
    y = builder.call("aten.relu.default", builder.call("aten.mm.default", x, w))
    return builder.finish([y, builder.call("aten.add.Tensor", total, y)])


def single(op: str, *args: float) -> IRGraph:
    builder = Builder()
    return builder.finish([builder.call(op, builder.input("x", (64,), "f32"), *args)])


@pytest.mark.parametrize("name", BOTH)
def test_two_microbatches_in_flight(name: str) -> None:
    """What the first gave stays while the second runs, and the total counts each once."""
    device = torch.device(name)
    run = task(weighed(), recorder(device), device=device, constants=[1], donated={2: 1})
    w, total = torch.randn(3, 3, device=device), torch.zeros(4, 3, device=device)
    inputs = [torch.randn(4, 3, device=device) for _ in range(3)]
    found = [run([x, w, total]) for x in inputs]
    wanted = [(x @ w).relu() for x in inputs]
    for (y, summed), expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(y, expected)
        assert summed is total
    torch.testing.assert_close(total, sum(wanted, torch.zeros_like(total)))
    assert run.unrecorded is None


def test_recording_is_once_and_a_replay_makes_no_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = StandIn()
    run = task(weighed(), stand_in.record, constants=[1], donated={2: 1})
    w, total = torch.randn(3, 3), torch.zeros(4, 3)
    run([torch.randn(4, 3), w, total])
    monkeypatch.setattr(run._executor, "run_bound", None)
    w.mul_(2.0)
    x = torch.randn(4, 3)
    torch.testing.assert_close(run([x, w, total])[0], (x @ w).relu())
    assert stand_in.count == 1


@pytest.mark.parametrize("name", BOTH)
def test_other_addresses_are_recorded_for_themselves(name: str) -> None:
    device = torch.device(name)
    run = task(weighed(), recorder(device), device=device, constants=[1], donated={2: 1})
    weights = [torch.randn(3, 3, device=device) for _ in range(2)]
    total, x = torch.zeros(4, 3, device=device), torch.randn(4, 3, device=device)
    for _ in range(3):
        for w in weights:
            torch.testing.assert_close(run([x, w, total])[0], (x @ w).relu())
    assert run._recording is not None
    assert len(run._recording._replays) == 2


def test_constants_that_never_stay_end_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "RECORDINGS", 2)
    stand_in = StandIn()
    run = task(weighed(), stand_in.record, constants=[1], donated={2: 1})
    weights, total = [torch.randn(3, 3) for _ in range(5)], torch.zeros(4, 3)
    x = torch.randn(4, 3)
    for w in weights:
        torch.testing.assert_close(run([x, w, total])[0], (x @ w).relu())
    assert stand_in.count == 2
    assert run.unrecorded == "constants of it have lain at more than 2 places"
    torch.testing.assert_close(total, sum((x @ w).relu() for w in weights))


def masked() -> IRGraph:
    """Others in place of the half of 64 numbers that is below 32."""
    builder = Builder()
    x, others = builder.input("x", (64,), "f32"), builder.input("others", (32,), "f32")
    mask = builder.call("aten.lt.Scalar", x, 32.0)
    return builder.finish([builder.call("aten.index_put.default", x, [mask], others)])


def check_masked(run: TaskProgram, device: torch.device) -> None:
    for _ in range(2):
        x = torch.randperm(64).float().to(device)
        found = run([x, torch.zeros(32, device=device)])
        torch.testing.assert_close(found[0], x.where(x >= 32.0, 0.0))


@pytest.mark.parametrize("name", BOTH)
def test_what_the_host_must_know_runs_call_by_call(name: str) -> None:
    device = torch.device(name)
    run = task(masked(), recorder(device), device=device)
    check_masked(run, device)
    assert "aten.index_put.default needs its results on the host" in str(run.unrecorded)


@pytest.mark.parametrize("name", BOTH)
def test_a_recording_that_fails_is_given_up_and_others_go_on(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody knew before that the host would be asked."""
    monkeypatch.setattr(cuda_graphs, "_INDEXING", set())
    device = torch.device(name)
    record = recorder(device)
    run = task(masked(), record, device=device)
    check_masked(run, device)
    assert "it could not be recorded: " in str(run.unrecorded)
    other = task(single("aten.relu.default"), record, device=device)
    x = torch.randn(64, device=device)
    for _ in range(2):
        torch.testing.assert_close(other([x])[0], x.relu())
    assert other.unrecorded is None


@pytest.mark.parametrize("name", BOTH)
def test_dropout_differs_and_recording_draws_nothing(name: str) -> None:
    """Each replay draws what the calls would have drawn."""
    device = torch.device(name)
    graph = single("aten.bernoulli.p", 0.5)
    run = task(graph, recorder(device), device=device)
    x = torch.ones(64, device=device)
    torch.manual_seed(3)
    found = [run([x])[0] for _ in range(3)]
    torch.manual_seed(3)
    wanted = [torch.bernoulli(x, 0.5) for _ in range(3)]
    for made, expected in zip(found, wanted, strict=True):
        assert torch.equal(made, expected)
    assert not torch.equal(found[0], found[1])


@pytest.mark.parametrize("kind", ["1f1b", "zb-h1"])
def test_a_pipeline_that_is_recorded_trains(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins: list[StandIn] = []

    def recorded(device: torch.device) -> Record:
        stand_ins.append(StandIn())
        return stand_ins[-1].record

    monkeypatch.setattr(tasks, "recorder", recorded)
    pipeline = sw.lower(linear_step(kind, microbatches=4))
    assert_trains(pipeline, in_process=True)
    assert len(stand_ins) == len(pipeline.devices)
    assert all(stand_in.count for stand_in in stand_ins)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("in_process", [True, pytest.param(False, marks=pytest.mark.workers)])
@pytest.mark.parametrize("kind", ["1f1b", "zb-h1"])
def test_a_pipeline_with_a_slot_on_cuda_trains(kind: str, in_process: bool) -> None:
    pipeline = sw.lower(linear_step(kind, microbatches=4))
    pipeline.devices["d0"] = Device("cuda", 0)
    assert_trains(pipeline, in_process=in_process)


@pytest.mark.gpu
@needs_gpu
def test_a_stages_graphs_share_one_pool_and_one_arena() -> None:
    pipeline = sw.lower(linear_step("1f1b", microbatches=4))
    found = compile_tasks(pipeline, slot_program(pipeline, "d0").memory, torch.device("cuda", 0))
    programs = [made.program for made in found.values()]
    assert all(isinstance(program, TaskProgram) for program in programs)
    memories = {id(p._recording._record.__self__) for p in programs}  # type: ignore[attr-defined]
    assert len(memories) == 1
    bases = {p._executor.memory.bases[0] for p in programs}  # type: ignore[attr-defined]
    assert len(bases) == 1
