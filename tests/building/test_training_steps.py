"""Whole training steps on slots against eager with the same microbatches: captured, planned, run.

Eager takes a microbatch at a time, and the parts of it that lie along the data axis where batch
norm looks at them; each loss is weighed by the labels that count in it.
"""

from functools import cache

import pytest
import torch
from torch.optim import SGD, AdamW

from shardwright.planner import plan
from shardwright.tracing import compile_ir
from tests.building.small_models import MODELS, batch_of, loss_of, made
from tests.building.step_runs import StepRun
from tests.turns import in_turn

ROWS = 8
MESHES = {
    "one": {"mesh": {"pipeline": 1}},
    "microbatches": {"mesh": {"pipeline": 1}, "microbatches": 2},
    "pipeline 2": {"mesh": {"pipeline": 2}, "microbatches": 2},
    "pipeline 4": {"mesh": {"pipeline": 4}, "microbatches": 4, "schedule": "zb-h1"},
    "interleaved": {"mesh": {"pipeline": 2}, "microbatches": 2, "schedule": "interleaved"},
    "v": {"mesh": {"pipeline": 2}, "microbatches": 4, "schedule": "zb-v"},
    "tensor 2": {"mesh": {"tensor": 2}, "microbatches": 2},
    "data 2": {"mesh": {"data": 2}, "microbatches": 2},
    "pipeline 2, tensor 2": {"mesh": {"pipeline": 2, "tensor": 2}, "microbatches": 2},
    "pipeline 2, data 2": {"mesh": {"pipeline": 2, "data": 2}, "microbatches": 2, "zero": 1},
    "sequence 2": {"mesh": {"sequence": 2}, "microbatches": 2},
    "three axes": {
        "mesh": {"pipeline": 2, "data": 2, "tensor": 2},
        "microbatches": 2,
        "zero": 1,
    },
}
OPTIMIZERS = {
    "adamw": lambda parameters: AdamW(parameters, lr=1e-2, eps=1e-4),
    "sgd": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1),
}


@cache
def compiled(name, microbatches, *, kind="adamw", clip=None):
    """The step graph of one microbatch."""
    model = made(name)
    optimizer = OPTIMIZERS[kind](model.parameters())

    def train_step(inputs, labels):
        loss = loss_of(model, inputs, labels)
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return compile_ir(train_step, *batch_of(name, ROWS // microbatches, 0))


def eager(name, steps, microbatches, shards, *, kind="adamw", clip=None):
    """Losses and the state dict after several steps on one device."""
    model = made(name)
    optimizer = OPTIMIZERS[kind](model.parameters())
    losses = []
    for number in range(steps):
        inputs, labels = batch_of(name, ROWS, number)
        counted = (labels != -100).sum().double()
        total = 0.0
        for some, some_labels in zip(
            inputs.chunk(microbatches), labels.chunk(microbatches), strict=True
        ):
            found = []
            before = {key: buffer.clone() for key, buffer in model.named_buffers()}
            for part, part_labels in zip(
                some.chunk(shards), some_labels.chunk(shards), strict=True
            ):
                for key, buffer in model.named_buffers():
                    buffer.copy_(before[key])
                weight = (part_labels != -100).sum() / counted
                loss = loss_of(model, part, part_labels) * weight
                loss.backward()
                total += loss.detach()
                found.append({key: buffer.clone() for key, buffer in model.named_buffers()})
            for key, buffer in model.named_buffers():
                parts = torch.stack([held[key].double() for held in found])
                buffer.copy_(parts.mean(0))
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, model.state_dict()


def check(name, options, steps=3, **how):
    microbatches = options.get("microbatches", 1)
    shards = options["mesh"].get("data", 1) if name == "resnet" else 1
    losses, expected = eager(name, steps, microbatches, shards, **how)
    graph = compiled(name, microbatches, **how)
    run = StepRun(graph, plan(graph, **options))
    rate = torch.tensor(1e-2 if how.get("kind", "adamw") == "adamw" else 0.1, dtype=torch.float64)
    for number, loss in enumerate(losses):
        inputs, labels = batch_of(name, ROWS, number)
        found = run.step({"inputs": inputs, "labels": labels, "lr": rate})
        assert abs(found - loss) <= 1e-12 * abs(loss)
    for key, tensor in run.stored().items():
        key = key.removeprefix("model.")
        limit = 1e-12 * expected[key].abs().max()
        assert (tensor - expected[key]).abs().max() <= limit, key


FAST = {
    "gpt": ("pipeline 4", "v", "tensor 2", "pipeline 2, data 2"),
    "llama": ("pipeline 2", "tensor 2"),
    "translator": ("interleaved", "pipeline 2, tensor 2"),
    "experts": ("microbatches", "data 2"),
    "resnet": ("pipeline 2", "data 2"),
}
"""What is tested in the fast tier; of the rest every fourth one with the models of the zoo."""


def cases():
    tried = in_turn(list(MODELS), list(MESHES), len(MESHES) // 4)
    for name in MODELS:
        for mesh in MESHES:
            marks = [] if mesh in FAST[name] else [pytest.mark.zoo]
            if mesh not in FAST[name] and (name, mesh) not in tried:
                marks.append(pytest.mark.exhaustive)
            yield pytest.param(name, mesh, marks=marks, id=f"{name}-{mesh}")


@pytest.mark.parametrize(("name", "mesh"), list(cases()))
def test_steps_equal_eager(name, mesh):
    check(name, MESHES[mesh])


@pytest.mark.parametrize(
    ("mesh", "kind"),
    [
        ("pipeline 2, tensor 2", "sgd"),
        ("pipeline 2, data 2", "adamw"),
        pytest.param("tensor 2", "adamw", marks=pytest.mark.zoo),
        pytest.param("pipeline 2", "sgd", marks=pytest.mark.zoo),
    ],
)
def test_clipped_steps_equal_eager(mesh, kind):
    check("gpt", MESHES[mesh], kind=kind, clip=0.1)
