"""Supertasks' programs: what they keep from run to run."""

import pytest
import torch

from shardwright.compiler.executor import Executor
from shardwright.compiler.lowering import lower_graph
from shardwright.compiler.memory.plan import ARENA, make_exec_plan
from shardwright.compiler.slots import SharedArena
from shardwright.compiler.tasks import TaskProgram, plan_task
from shardwright.errors import InputError
from shardwright.ir import Builder
from shardwright.kernels.emitters import emit_graph


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


@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
def test_an_arena_that_grows_moves_all_that_lie_in_it(native: bool) -> None:
    """Between two runs: what a slot gave before stays as it was."""
    arena, cpu = SharedArena(torch.device("cpu")), torch.device("cpu")

    def executor(rows: int) -> Executor:
        builder = Builder()
        x = builder.input("x", (rows, 3), "f64")
        x_t = builder.call("aten.t.default", x)
        made = builder.call("aten.relu.default", builder.call("aten.mm.default", x, x_t))
        plan = make_exec_plan(lower_graph(emit_graph(builder.finish([made, made]))))
        executor = Executor(plan, device=cpu, native=native)
        arena.lend(executor.memory, plan.arena_bytes)
        return executor

    small, x = executor(4), torch.randn(4, 3, dtype=torch.float64)
    slot = small.run({"x": x}, copy=False)[0]
    kept = slot.clone()
    large = executor(64)
    assert small.memory.bases[ARENA] == large.memory.bases[ARENA]
    y = torch.randn(64, 3, dtype=torch.float64)
    assert torch.allclose(large.run({"x": y})[0], (y @ y.t()).relu())
    assert torch.equal(slot, kept)
    assert torch.allclose(small.run({"x": x})[0], (x @ x.t()).relu())
    assert small.run(copy=False)[0].data_ptr() != slot.data_ptr()
    del small
    assert len(arena._living()) == 1
