"""Programs of a slot's supertasks."""

from __future__ import annotations

import pytest
import torch

from shardwright.errors import RunError
from shardwright.runtime.compiling import compile_tasks
from tests.runtime.linear_step import WIDTH, linear_step
from tests.runtime.sketch import Sketch, chain, identity

CPU = torch.device("cpu")


def test_equal_supertasks_share_a_program() -> None:
    sketch = Sketch(1)
    sketch.input("x", (2,))
    for i in range(3):
        sketch.fx(f"d0.{i}", "d0", [f"y{i - 1}" if i else "x"], [f"y{i}"], identity)
    found = compile_tasks(sketch.finish(["y2"]), ["d0.0", "d0.1", "d0.2"], CPU)
    assert found["d0.0"].program is found["d0.1"].program is found["d0.2"].program
    assert (found["d0.0"].first, found["d0.0"].writes, found["d0.0"].sharing) == (None, (), {})
    assert compile_tasks(chain(1), [], CPU) == {}


def test_a_step_has_programs_that_overwrite() -> None:
    pipeline = linear_step()
    names = [name for name in pipeline.tasks_of("d0") if pipeline.supertasks[name].kind == "FX"]
    found = compile_tasks(pipeline, names, CPU)
    assert found["F0.0"].writes == ()
    assert found["W0.0"].writes == ("g0.0",)
    assert found["U0.0"].writes == ("m0.0", "w0.0")
    assert found["U0.0"].sharing == {"w_new0.0": {"w0.0"}, "m_new0.0": {"m0.0"}}
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
        compile_tasks(pipeline, ["d0.0"], CPU)
