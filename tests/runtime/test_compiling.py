"""Programs of a slot's supertasks."""

from __future__ import annotations

import torch

from shardwright.exec import lower
from shardwright.exec.task_program import TaskProgram
from shardwright.runtime.compiling import compile_tasks
from shardwright.schedule.slot_steps import slot_steps
from tests.runtime.linear_step import WIDTH, linear_step
from tests.runtime.sketch import Sketch, chain, identity

CPU = torch.device("cpu")


def test_equal_supertasks_share_a_program() -> None:
    sketch = Sketch(1)
    sketch.input("x", (2,))
    for i in range(3):
        sketch.fx(f"d0.{i}", "d0", [f"y{i - 1}" if i else "x"], [f"y{i}"], identity)
    pipeline = sketch.finish(["y2"])
    found = compile_tasks(pipeline, slot_steps(pipeline, "d0").overwriting, CPU)
    assert found["d0.0"].program is found["d0.1"].program is found["d0.2"].program
    assert found["d0.0"].first is None
    assert compile_tasks(chain(1), {}, CPU) == {}


def test_a_step_has_programs_that_overwrite() -> None:
    pipeline = linear_step()
    found = compile_tasks(pipeline, slot_steps(pipeline, "d0").overwriting, CPU)
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
    found = compile_tasks(pipeline, slot_steps(pipeline, "d0").overwriting, CPU)
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
    found = compile_tasks(pipeline, slot_steps(pipeline, "d0").overwriting, CPU)
    programs = [found[f"d0.{i}"].program for i in range(2)]
    assert all(isinstance(program, TaskProgram) for program in programs)
    assert programs[0] is not programs[1]
    assert programs[0].plan is programs[1].plan  # type: ignore[attr-defined]
