"""Pipelines as text."""

from __future__ import annotations

import msgspec

from shardwright.pipeline import Device
from shardwright.pipeline.text import format_pipeline, format_slice
from tests.pipeline.documents import COLLECTIVES, two_stages
from tests.pipeline.training import training_step


def test_two_stages() -> None:
    assert format_pipeline(two_stages()) == (
        "pipeline mlp: 2 devices, 8 tensors (3 constants, 576 B), 7 supertasks\n"
        "  input   x f32[4, 8] on d0\n"
        "  output  y f32[4, 2] on d1\n"
        "d0  cpu:0, 2 constants, 512 B\n"
        "  d0.0  FX      (x, 1 constant) -> (h1)\n"
        "  d0.1  FX      (h1, 1 constant) -> (h2)\n"
        "  send  send    h2 f32[4, 8] -> d1\n"
        "d1  cpu:1, 1 constant, 64 B\n"
        "  recv  recv    h2@d1 f32[4, 8] <- d0\n"
        "  d1.0  FX      (h2@d1, 1 constant) -> (y)"
    )


def test_a_training_step() -> None:
    document = training_step()
    assert document.training is not None
    document.training.notes = ("mixes the batch: batch_norm",)
    lines = format_pipeline(document).splitlines()
    assert lines[1:7] == [
        "  step    2 microbatches, 1f1b over 2 pipeline ranks of 1 stage: d0 | d1",
        "  cut     x along dim 0, labels along dim 0, prediction along dim 0",
        "  tasks   1 prepare, 4 forward, 3 backward, 2 backward_weight, 3 update",
        "  new     each microbatch: 3 begun with zeros (324 B)",
        "  new     each step: 2 stored (320 B)",
        "  note    mixes the batch: batch_norm",
    ]


def test_collectives() -> None:
    lines = format_pipeline(COLLECTIVES["reduce"]()).splitlines()
    assert lines[-5] == "  reduce.0  reduce  x0 f32[4, 6] with d1, d2, reduce_op=min, dst=d1"
    assert lines[-3] == (
        "  reduce.1  reduce  x1 f32[4, 6] -> y1 f32[4, 6] with d0, d2, reduce_op=min, dst=d1"
    )


def test_devices() -> None:
    document = two_stages()
    document.devices = {"d0": Device("npu", 0, pes=(0, 1)), "d1": Device("cuda", 1, "right")}
    text = format_pipeline(document)
    assert "\nd0  npu:0 pes 0, 1, 2 constants" in text
    assert "\nd1  cuda:1 on right, 1 constant" in text


def test_a_part_of_a_tensor_is_written_as_a_slice() -> None:
    assert format_slice("x", ((0, 4), (0, 8)), (4, 8)) == "x"
    assert format_slice("x", ((2, 4), (0, 8)), (4, 8)) == "x[2:4, :]"
    assert format_slice("x", (), ()) == "x"


def test_slices_of_inputs_and_outputs() -> None:
    document = two_stages()
    slices = document.metadata.tensor_slices.outputs
    slices["y"] = msgspec.structs.replace(slices["y"], placements=((0, 4), (0, 1)))
    assert "\n  output  y f32[4, 2] on d1, output[:, 0:1]\n" in format_pipeline(document)
