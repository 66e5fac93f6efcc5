"""Supertasks' programs: what they keep from run to run."""

import pytest
import torch

from shardwright.errors import InputError
from shardwright.exec.emitters import emit_graph
from shardwright.exec.lowering import lower_graph
from shardwright.exec.shared_arena import SharedArena
from shardwright.exec.task_program import TaskProgram, plan_task
from shardwright.ir import Builder


def program() -> TaskProgram:
    builder = Builder()
    x = builder.input("x", (2, 3), "f32")
    graph = builder.finish([builder.call("aten.relu.default", x)])
    cpu = torch.device("cpu")
    return TaskProgram(
        plan_task(lower_graph(emit_graph(graph))), cpu, SharedArena(cpu), constants=[0]
    )


def test_a_refused_call_is_refused_again_and_never_runs_on_what_was_there() -> None:
    run = program()
    run([torch.ones(2, 3)])
    wrong = torch.ones(3, 3)
    for _ in range(2):
        with pytest.raises(InputError, match="static"):
            run([wrong])
    (found,) = run([torch.full((2, 3), 5.0)])
    assert torch.equal(found, torch.full((2, 3), 5.0))


def test_it_keeps_copies_of_what_torchs_calls_read_and_make() -> None:
    builder = Builder()
    x = builder.input("x", (2, 3), "f32")
    graph = builder.finish([builder.call("aten.cumsum.default", x, 1)])
    cpu = torch.device("cpu")
    lowered = lower_graph(emit_graph(graph))
    made = TaskProgram(plan_task(lowered), cpu, SharedArena(cpu))
    assert made.kept_bytes == 2 * 24
    fixed = TaskProgram(plan_task(lowered), cpu, SharedArena(cpu), constants=[0])
    assert fixed.kept_bytes == 24


def test_native_calls_read_and_write_where_tensors_are() -> None:
    assert program().kept_bytes == 0
