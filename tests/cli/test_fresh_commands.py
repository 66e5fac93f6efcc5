"""Each command on files that another process made, in a process of its own."""

from pathlib import Path

import pytest
import typer

from shardwright.cli.app import app
from tests.clean_process import printed_by

PROGRAMS = """
import torch
from torch import nn


def layers():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))


def make():
    return layers().eval(), (torch.ones(4, 8),), {}


def train():
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step, [torch.randn(8, 8) for _ in range(4)]
"""
MAKING = """
import torch
import shardwright as sw
from programs import make, train

model, args, _ = make()
graph = sw.capture(model, args)
for name, mesh in (("stages", {"pipeline": 2}), ("tensor", {"tensor": 2})):
    pipeline = sw.build(graph, sw.plan(graph, mesh=mesh))
    pipeline.save(f"{name}.json")
    sw.lower(pipeline).save(f"{name}.lowered.json")
sw.profile(graph, n_iter=1, cache=False).save("model.profile.json")

step, data = train()
graph = sw.compile_ir(step, data[0][:4])
plan = sw.plan(graph, mesh={"pipeline": 2}, microbatches=2)
plan.save("step.plan.json")
pipeline = sw.build(graph, plan)
pipeline.save("step.json")
sw.lower(pipeline).save("step.lowered.json")
sw.train(step, data, mesh={"tensor": 2}, steps=2, checkpoint="kept", in_process=True, quiet=True)
"""
COMMANDS = [
    "check stages.json --weights",
    "check stages.lowered.json --weights",
    "check step.lowered.json",
    "show tensor.json",
    "show stages.json --task d0.0",
    "show stages.lowered.json --task d0.0 --memory",
    "show step.json --schedule",
    "run tensor.json --random --in-process",
    "run tensor.lowered.json --random --in-process",
    "run stages.lowered.json --random --timeline",
    "verify stages.json programs.py:make",
    "simulate step.json",
    "simulate stages.lowered.json --measure",
    "lower tensor.json -o low.json",
    "plan step.plan.json",
    "plan --diff step.plan.json step.plan.json",
    "plan programs.py:make --devices 2 --policy metis --profile model.profile.json",
    "build programs.py:train --plan step.plan.json -o built.json",
    "draw programs.py:train --plan step.plan.json -o step.dot",
    "codegen programs.py:train --plan step.plan.json -o stages.py",
    "profile programs.py:make --n-iter 1 --no-cache",
    "train programs.py:train --mesh pipeline=2 --epochs 1 --checkpoint kept --resume --in-process",
    "cluster --devices 1 --n-iter 1",
    "schema",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("made")
    (made / "programs.py").write_text(PROGRAMS)
    (made / "making.py").write_text(MAKING)
    printed_by("python", "making.py", folder=made)
    return made


@pytest.mark.workers
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_on_files_of_another_process(command: str, folder: Path) -> None:
    printed_by("shardwright", *command.split(), folder=folder)


def test_every_command_is_tried() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert {command.split()[0] for command in COMMANDS} == set(commands) - {"demo"}
