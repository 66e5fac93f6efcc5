from __future__ import annotations

import pytest
import torch

from shardwright.compiler import lower
from shardwright.engine.slot import SlotProgram, make_slot, torch_device
from shardwright.engine.slot_steps import constants_of
from shardwright.errors import DeviceError
from shardwright.pipeline import Device, Pipeline
from tests.runtime.sketch import Sketch, chain, every_collective, identity


def slot_of(pipeline: Pipeline, name: str) -> SlotProgram:
    constants = pipeline.weights.load(constants_of(pipeline, name))
    return make_slot(pipeline, name, constants)


def test_a_slot_holds_its_own_part() -> None:
    slot = slot_of(chain(3), "d1")
    assert (slot.rank, [step.task for step in slot.steps]) == (
        1,
        ["recv.y0@d1", "d1.0", "send.y1@d2"],
    )
    assert list(slot.constants) == ["w1"]
    assert slot.outputs == ()
    assert slot_of(chain(3), "d2").outputs == ("y2",)


def test_steps_say_what_they_are_about() -> None:
    recv, compute, send = slot_of(chain(3), "d1").steps
    assert (recv.kind, recv.tensor, recv.nbytes) == ("recv", "y0@d1", 3 * 4 * 4)
    assert (compute.kind, compute.tensor, compute.nbytes) == ("compute", None, 0)
    assert (send.kind, send.tensor, send.nbytes) == ("send", "y1", 3 * 4 * 4)
    assert {step.kind for step in slot_of(every_collective(2), "d1").steps} == {
        "collective",
        "recv",
        "compute",
    }


def test_tensors_die_after_their_last_use() -> None:
    recv, compute, send = slot_of(chain(3), "d1").steps
    assert [step.dead for step in (recv, compute, send)] == [(), ("y0@d1",), ("y1",)]
    assert slot_of(chain(2), "d1").steps[-1].dead == ("y0@d1",), "outputs and constants live"


def test_an_output_that_nobody_reads_dies_at_once() -> None:
    sketch = Sketch(1)
    sketch.input("x", (2,))
    sketch.fx("a", "d0", ["x"], ["y"], identity)
    sketch.fx("b", "d0", ["x"], ["z"], identity)
    first, second = slot_of(sketch.finish(["z"]), "d0").steps
    assert first.dead == ("y",)
    assert second.dead == ("x",)


def test_equal_supertasks_share_a_program() -> None:
    sketch = Sketch(1)
    sketch.input("x", (2,))
    sketch.input("wide", (3,))
    sketch.fx("a", "d0", ["x"], ["y"], identity)
    sketch.fx("b", "d0", ["y"], ["z"], identity)
    sketch.fx("c", "d0", ["wide"], ["u"], identity)
    steps = slot_of(sketch.finish(["z", "u"]), "d0").steps
    assert steps[0].program is steps[1].program
    assert steps[2].program is not steps[0].program


def test_state_begins_with_zeros() -> None:
    sketch = Sketch(1)
    sketch.input("x", (2,))
    sketch.constant("count", torch.ones(2))
    sketch.fx("a", "d0", ["x", "count"], ["y"], lambda b, x, c: b.call("aten.add.Tensor", x, c))
    pipeline = sketch.finish(["y"])
    pipeline.tensors["count"].value = None
    pipeline.tensors["count"].init = "zeros"
    assert slot_of(pipeline, "d0").constants["count"].tolist() == [0, 0]


def test_devices() -> None:
    assert torch_device("d0", Device("cpu", 3)) == torch.device("cpu")
    with pytest.raises(DeviceError, match=r"'d0' is of kind 'npu'.*change the slot's kind to cpu"):
        torch_device("d0", Device("npu", 0))
    with pytest.raises(DeviceError, match=r"'d0' is cuda 99, but this machine has \d+ CUDA"):
        torch_device("d0", Device("cuda", 99))


def test_lowered_supertasks_are_steps_like_others() -> None:
    steps = [slot_of(pipeline, "d0").steps for pipeline in (chain(1), lower(chain(1)))]
    assert [step.kind for step in steps[0]] == [step.kind for step in steps[1]]
    assert steps[1][0].program is not None
