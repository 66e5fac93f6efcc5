"""Programs of a slot's supertasks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from shardwright.compiler import lower
from shardwright.compiler.memory.plan import ARENA
from shardwright.compiler.slots import SharedArena
from shardwright.compiler.tasks import TaskProgram, compile_slot, compile_tasks, task_plan
from shardwright.engine.program import constants_of, slot_program
from shardwright.engine.slot import LoadedSlot
from shardwright.ir import Builder, IRValue
from shardwright.pipeline import Pipeline
from tests.runtime.linear_step import WIDTH, linear_step
from tests.runtime.sketch import Sketch, chain, identity


def slot_of(pipeline: Pipeline, name: str) -> LoadedSlot:
    constants = pipeline.weights.load(constants_of(pipeline, name))
    return compile_slot(pipeline, name, constants)


def test_a_slot_holds_its_own_part() -> None:
    slot = slot_of(chain(3), "d1")
    assert slot.rank == 1
    assert list(slot.constants) == ["w1"]
    assert [list(slot_of(pipeline, "d1").tasks) for pipeline in (chain(3), lower(chain(3)))] == [
        ["d1.0"],
        ["d1.0"],
    ]


def test_state_begins_with_zeros() -> None:
    sketch = Sketch(1)
    sketch.input("x", (2,))
    sketch.constant("count", torch.ones(2))
    sketch.fx("a", "d0", ["x", "count"], ["y"], lambda b, x, c: b.call("aten.add.Tensor", x, c))
    pipeline = sketch.finish(["y"])
    pipeline.tensors["count"].value = None
    pipeline.tensors["count"].init = "zeros"
    assert slot_of(pipeline, "d0").constants["count"].tolist() == [0, 0]


CPU = torch.device("cpu")


def test_equal_supertasks_share_a_program() -> None:
    sketch = Sketch(1)
    sketch.input("x", (2,))
    for i in range(3):
        sketch.fx(f"d0.{i}", "d0", [f"y{i - 1}" if i else "x"], [f"y{i}"], identity)
    pipeline = sketch.finish(["y2"])
    found = compile_tasks(pipeline, slot_program(pipeline, "d0").memory, CPU)
    assert found["d0.0"].program is found["d0.1"].program is found["d0.2"].program
    assert found["d0.0"].first is None
    assert compile_tasks(chain(1), {}, CPU) == {}


def test_a_step_has_programs_that_overwrite() -> None:
    pipeline = linear_step()
    found = compile_tasks(pipeline, slot_program(pipeline, "d0").memory, CPU)
    first = found["W0.0"].first
    assert first is not None
    acc = torch.full((WIDTH, WIDTH), torch.nan).double()
    h, dy = torch.ones(4, WIDTH).double(), torch.ones(4, WIDTH).double()
    first([acc, h, dy])
    assert torch.equal(acc, torch.full_like(acc, 4.0))
    found["W0.0"].program([acc, h, dy])
    assert torch.equal(acc, torch.full_like(acc, 8.0))


def test_lowered_supertasks_overwrite_too() -> None:
    pipeline = lower(linear_step())
    found = compile_tasks(pipeline, slot_program(pipeline, "d0").memory, CPU)
    first = found["W0.0"].first
    assert first is not None
    acc = torch.full((WIDTH, WIDTH), torch.nan).double()
    h, dy = torch.ones(4, WIDTH).double(), torch.ones(4, WIDTH).double()
    (made,) = first([acc, h, dy])
    assert made is acc
    assert torch.equal(acc, torch.full_like(acc, 4.0))
    found["W0.0"].program([acc, h, dy])
    assert torch.equal(acc, torch.full_like(acc, 8.0))


def test_equal_lowered_supertasks_share_a_plan() -> None:
    sketch = Sketch(1)
    sketch.input("x", (2,))
    for i in range(2):
        sketch.fx(f"d0.{i}", "d0", [f"y{i - 1}" if i else "x"], [f"y{i}"], identity)
    pipeline = lower(sketch.finish(["y1"]))
    found = compile_tasks(pipeline, slot_program(pipeline, "d0").memory, CPU)
    programs = [found[f"d0.{i}"].program for i in range(2)]
    assert all(isinstance(program, TaskProgram) for program in programs)
    assert programs[0] is not programs[1]
    assert programs[0].plan is programs[1].plan  # type: ignore[attr-defined]


def grown(rows: int) -> Callable[[Builder, IRValue], IRValue]:
    """A supertask that needs room for so many rows on its way."""

    def body(builder: Builder, x: IRValue) -> IRValue:
        outer = builder.call(
            "aten.mul.Tensor", x, builder.call("aten.expand.default", x, [rows, 2])
        )
        return builder.call("aten.amax.default", builder.call("aten.cumsum.default", outer, 0), [0])

    return body


def test_lowered_supertasks_lie_in_one_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    sketch, rows = Sketch(1), (4, 64, 16, 256)
    sketch.input("x", (2,))
    for i, count in enumerate(rows):
        sketch.fx(f"d0.{i}", "d0", [f"y{i - 1}" if i else "x"], [f"y{i}"], grown(count))
    pipeline = lower(sketch.finish([f"y{len(rows) - 1}"]))
    made: list[int] = []
    new = SharedArena._new
    monkeypatch.setattr(SharedArena, "_new", lambda own, n: made.append(n) or new(own, n))
    found = compile_tasks(pipeline, slot_program(pipeline, "d0").memory, CPU)
    programs = [found[f"d0.{i}"].program for i in range(len(rows))]
    plans = [task_plan(pipeline, f"d0.{i}") for i in range(len(rows))]
    assert len({plan.arena_bytes for plan in plans}) == len(rows)
    assert made == [max(plan.arena_bytes for plan in plans)]
    bases = {p._executor.memory.bases[ARENA] for p in programs}  # type: ignore[attr-defined]
    assert len(bases) == 1
