"""A slot's supertasks as data."""

from __future__ import annotations

from shardwright.engine.overwriting import Overwriting
from shardwright.engine.slot_steps import constants_of, slot_steps
from tests.runtime.linear_step import linear_step
from tests.runtime.sketch import Sketch, chain, identity


def test_what_a_slot_has_and_gives() -> None:
    found = slot_steps(chain(3), "d1")
    assert [(step.task, step.does, step.dead) for step in found.steps] == [
        ("recv.y0@d1", "communicate", ()),
        ("d1.0", "compute", ("y0@d1",)),
        ("send.y1@d2", "communicate", ("y1",)),
    ]
    assert [step.communicates for step in found.steps] == [True, False, True]
    assert dict(found.constants) == constants_of(chain(3), "d1")
    assert (found.outputs, found.replaces) == ((), {})


def test_an_output_that_nobody_reads_dies_at_once() -> None:
    sketch = Sketch(1)
    sketch.input("x", (2,))
    sketch.fx("a", "d0", ["x"], ["y"], identity)
    sketch.fx("b", "d0", ["x"], ["z"], identity)
    first, second = slot_steps(sketch.finish(["z"]), "d0").steps
    assert (first.dead, second.dead) == (("y",), ("x",))


def test_a_step_overwrites_what_is_replaced() -> None:
    found = slot_steps(linear_step(), "d0")
    assert found.replaces == {"g_new0.0": "g0.0", "w_new0.0": "w0.0", "m_new0.0": "m0.0"}
    memory = found.overwriting
    assert memory["F0.0"] == Overwriting()
    assert memory["W0.0"].zeros == {"g0.0"}
    assert memory["U0.0"].sharing == {"w_new0.0": {"w0.0"}, "m_new0.0": {"m0.0"}}
    steps = {step.task: step for step in found.steps}
    assert (steps["W0.0"].writes, steps["W0.0"].starts) == (("g0.0",), True)
    assert (steps["U0.0"].writes, steps["U0.0"].starts) == (("m0.0", "w0.0"), False)
