"""Slots on a CUDA device. One device is enough: the other slot is on the CPU."""

from __future__ import annotations

import pytest
import torch

from shardwright.pipeline import Device
from shardwright.runtime import Runner
from tests.runtime.linear_step import linear_step
from tests.runtime.sketch import chain, chain_result
from tests.runtime.test_training_runner import assert_trains

needs_device = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="there is no CUDA device here"
)


@pytest.mark.gpu
@needs_device
@pytest.mark.parametrize("in_process", [True, pytest.param(False, marks=pytest.mark.processes)])
@pytest.mark.parametrize("slot", ["d0", "d1"])
def test_a_slot_on_cuda(slot: str, in_process: bool) -> None:
    pipeline = chain(2)
    pipeline.devices[slot] = Device("cuda", 0)
    stream = [torch.randn(3, 4) for _ in range(4)]
    with Runner(pipeline, in_process=in_process, trace=True) as runner:
        for x, found in zip(stream, runner.map(stream), strict=True):
            assert found.device.type == "cpu"
            torch.testing.assert_close(found, chain_result(x), rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@needs_device
@pytest.mark.parametrize("in_process", [True, pytest.param(False, marks=pytest.mark.processes)])
@pytest.mark.parametrize("slot", ["d0", "d1"])
def test_steps_with_a_slot_on_cuda(slot: str, in_process: bool) -> None:
    pipeline = linear_step("1f1b", microbatches=4)
    pipeline.devices[slot] = Device("cuda", 0)
    assert_trains(pipeline, in_process=in_process)
