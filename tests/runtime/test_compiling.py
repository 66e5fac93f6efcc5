"""Programs of a slot's supertasks."""

from __future__ import annotations

import pytest
import torch

from shardwright.errors import RunError
from shardwright.runtime.compiling import check_kinds, compile_tasks
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


def test_a_kind_that_does_not_run() -> None:
    pipeline = chain(1)
    pipeline.supertasks["d0.0"].kind = "dfg"
    with pytest.raises(RunError, match=r"'d0\.0' is of kind 'dfg'"):
        check_kinds(pipeline, "d0")
    check_kinds(chain(1), "d0")
