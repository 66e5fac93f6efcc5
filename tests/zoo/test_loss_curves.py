"""Fifty steps of AdamW on a mesh: the losses are those of one device.

The reference is an ordinary loop with the same microbatches and, since batch norm has statistics of
its own in each, data shards. In every run the loss falls by at least 30%, so that what is compared
is training.
"""

from functools import cache

import pytest
import torch
from torch.nn import functional as F

import shardwright as sw
from tests.trainable import TASKS
from tests.turns import rotated

pytestmark = pytest.mark.zoo

STEPS = 50
RATE = 1e-3
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-4}
MESHES = {
    "pipeline 2": {"mesh": {"pipeline": 2}},
    "pipeline 4": {"mesh": {"pipeline": 4}},
    "tensor 2": {"mesh": {"tensor": 2}},
    "data 2": {"mesh": {"data": 2}},
    "pipeline 2 × tensor 2": {"mesh": {"pipeline": 2, "tensor": 2}},
    "pipeline 2 × data 2 × zero 1": {"mesh": {"pipeline": 2, "data": 2}, "zero": 1},
}
RUNS = [
    (mesh, dtype)
    for number, mesh in enumerate(MESHES)
    for dtype in (list(TOLERANCE) if number % 2 else reversed(TOLERANCE))
]
"""Each mesh with both dtypes."""
MICROBATCHES = 2
SAMPLE = [
    ("gpt", "pipeline 2"),
    ("t5", "pipeline 2 × tensor 2"),
    ("resnet", "pipeline 2 × data 2 × zero 1"),
]
"""What runs on worker processes too."""


class Program:
    """A task's model and optimizer, its batches, and its step on one device."""

    def __init__(self, name, dtype):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = TASKS[name].model().to(dtype)
            self.batches = [
                tuple(t.to(dtype) if t.is_floating_point() else t for t in TASKS[name].batch())
                for _ in range(2)
            ]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE)

    def loss(self, *batch):
        *inputs, labels = batch
        return F.cross_entropy(self.model(*inputs).flatten(0, -2), labels.flatten())

    def step(self, *batch):
        self.optimizer.zero_grad()
        loss = self.loss(*batch)
        loss.backward()
        self.optimizer.step()
        return loss

    def batch(self, step):
        return self.batches[step % len(self.batches)]

    def parts(self, step, count):
        return zip(*(tensor.chunk(count) for tensor in self.batch(step)), strict=True)


@cache
def graph_of(name, dtype):
    program = Program(name, dtype)
    return sw.compile_ir(program.step, *next(program.parts(0, MICROBATCHES)))


@cache
def reference(name, dtype, count):
    """The losses of a loop that adds the gradients of so many parts of each batch."""
    program = Program(name, dtype)
    losses = []
    for step in range(STEPS):
        program.optimizer.zero_grad()
        total = 0.0
        for part in program.parts(step, count):
            loss = program.loss(*part) / count
            loss.backward()
            total += loss.item()
        program.optimizer.step()
        losses.append(total)
    return losses


def check(name, mesh, dtype, **options):
    graph, options_of_plan = graph_of(name, dtype), MESHES[mesh]
    pipeline = sw.build(graph, sw.plan(graph, microbatches=MICROBATCHES, **options_of_plan))
    program = Program(name, dtype)
    with sw.Session(pipeline, **options) as session:
        futures = [session.submit(*program.batch(step), lr=RATE) for step in range(STEPS)]
        losses = [future.result().item() for future in futures]
    shards = options_of_plan["mesh"].get("data", 1)
    expected = reference(name, dtype, MICROBATCHES * shards)
    assert losses[-1] <= 0.7 * losses[0]
    errors = [abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)]
    assert max(errors) <= TOLERANCE[dtype]


@pytest.mark.parametrize(("name", "run"), rotated(tuple(TASKS), RUNS, 2))
def test_fifty_steps_have_the_losses_of_one_device(name, run):
    mesh, dtype = run
    check(name, mesh, dtype, in_process=True)


@pytest.mark.workers
@pytest.mark.parametrize(("name", "mesh"), SAMPLE)
def test_worker_processes_have_the_losses_of_one_device(name, mesh):
    check(name, mesh, torch.float64)
