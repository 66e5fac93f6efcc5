"""One program trained in one way: how fast, with how much memory, and how well.

Comes in: the names of a program and of a way. Goes out: a `Run`, in which everything is a number or
a name, so that it can be kept as JSON. Each device is a process of one thread.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch

import shardwright as sw
from benchmarks.experiments.programs import Program, make_program

WARMUP = 5
"""Steps that no time is taken of."""
PYTORCH = "PyTorch"
"""The way that the others are compared with: an ordinary loop in this process."""
WAYS: dict[str, dict[str, Any]] = {
    "one device": {"devices": 1},
    "pipeline 2": {"mesh": {"pipeline": 2}, "microbatches": 4},
    "tensor 2": {"mesh": {"tensor": 2}},
    "data 2": {"mesh": {"data": 2}},
    "pipeline 4": {"mesh": {"pipeline": 4}, "microbatches": 4},
    "tensor 4": {"mesh": {"tensor": 4}},
    "data 4": {"mesh": {"data": 4}},
    "pipeline 2 × tensor 2": {"mesh": {"pipeline": 2, "tensor": 2}, "microbatches": 4},
    "pipeline 2 × data 2, zero 1": {
        "mesh": {"pipeline": 2, "data": 2},
        "microbatches": 4,
        "zero": 1,
    },
}
"""How else it is trained, as `sw.train` takes it."""


class Run(msgspec.Struct, frozen=True):
    """What came of training a program in one way.

    devices
        How many.
    speed, noun
        How many of what are trained on in a second, by the median of the steps' times.
    stored
        Bytes of parameters, optimizer state and, of several microbatches, gradient sums on the
        device that has most of them; None where nobody counts.
    losses, accuracy
        Of each step, and on what is held out, at the end.
    """

    program: str
    way: str
    devices: int
    speed: float
    noun: str
    stored: int | None
    losses: list[float]
    accuracy: float


def measure(name: str, way: str, steps: int) -> Run:
    """Train a program in one way."""
    program = make_program(name, steps)
    train: Callable[..., Run] = _in_pytorch if way == PYTORCH else _on_devices
    return train(name, way, program)


def _in_pytorch(name: str, way: str, program: Program) -> Run:
    losses, seconds = [], []
    for batch in program.training:
        start = time.perf_counter()
        losses.append(program.step(*batch).item())
        seconds.append(time.perf_counter() - start)
    program.model.eval()
    with torch.no_grad():
        found = [(program.evaluate(*batch), len(batch[0])) for batch in program.testing]
    right = sum(numbers["accuracy"].item() * size for numbers, size in found)
    accuracy = right / sum(size for _, size in found)
    speed = _speed(program, seconds)
    return Run(name, way, 1, speed, program.noun, None, losses, accuracy)


def _on_devices(name: str, way: str, program: Program) -> Run:
    result = sw.train(
        program.step,
        program.training,
        steps=len(program.training),
        evaluate=program.evaluate,
        eval_data=program.testing,
        quiet=True,
        write_back=False,
        **WAYS[way],
    )
    return Run(
        program=name,
        way=way,
        devices=len(result.pipeline.devices),
        speed=_speed(program, result.seconds),
        noun=program.noun,
        stored=max(stored_bytes(result.pipeline).values()),
        losses=result.losses,
        accuracy=next(reversed(result.evaluations.values()))["accuracy"],
    )


def _speed(program: Program, seconds: list[float]) -> float:
    return program.count / statistics.median(seconds[WARMUP:])


def stored_bytes(pipeline: sw.Pipeline) -> dict[str, int]:
    """Bytes of what each device slot keeps from step to step."""
    homes = pipeline.connections.devices
    found = dict.fromkeys(pipeline.devices, 0)
    for name, info in pipeline.tensors.items():
        if info.is_constant:
            found[homes[name]] += info.nbytes
    return found
