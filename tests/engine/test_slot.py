from __future__ import annotations

import pytest
import torch

from shardwright.compiler import lower
from shardwright.engine.program import constants_of
from shardwright.engine.slot import LoadedSlot, compile_slot, torch_device
from shardwright.errors import DeviceError
from shardwright.pipeline import Device, Pipeline
from tests.runtime.sketch import Sketch, chain


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


def test_devices() -> None:
    assert torch_device("d0", Device("cpu", 3)) == torch.device("cpu")
    with pytest.raises(DeviceError, match=r"'d0' is of kind 'npu'.*change the slot's kind to cpu"):
        torch_device("d0", Device("npu", 0))
    with pytest.raises(DeviceError, match=r"'d0' is cuda 99, but this machine has \d+ CUDA"):
        torch_device("d0", Device("cuda", 99))
