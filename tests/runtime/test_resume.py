"""A run that goes on, on whichever mesh, has the losses of the run that was never interrupted."""

import shutil
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shardwright.training import train
from tests.runtime.programs import GPT, WIDTH, Trained, tokens
from tests.turns import rotated

STEPS, BEFORE = 5, 3
MESHES = {
    "pipeline 2": {"pipeline": 2},
    "data 2": {"data": 2},
    "tensor 2": {"tensor": 2},
    "pipeline 2 x tensor 2": {"pipeline": 2, "tensor": 2},
    "tensor 4": {"tensor": 4},
}


def program(*, tied: bool) -> Trained:
    """A decoder; weights decay in one group of parameters, gradients are clipped."""
    torch.manual_seed(0)
    model = GPT(0.0)
    if not tied:
        model.head.weight = nn.Parameter(torch.randn(20, WIDTH) / 4)
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in model.parameters():
        groups[parameter.dim() > 1].append(parameter)
    optimizer = torch.optim.AdamW(
        [{"params": groups[True], "weight_decay": 0.1}, {"params": groups[False], "lr": 0.02}],
        lr=0.01,
    )

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss

    return Trained(model, optimizer, step, step)


def losses(mesh: str, *, tied: bool, steps: int, directory: Path, resume: bool) -> list[float]:
    return train(
        program(tied=tied).step,
        tokens(STEPS),
        mesh=MESHES[mesh],
        microbatches=2,
        steps=steps,
        checkpoint=directory,
        resume=resume,
        in_process=True,
        quiet=True,
    ).losses


@cache
def unbroken(*, tied: bool) -> list[float]:
    return program(tied=tied).loop(tokens(STEPS))


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory):
    """The checkpoint of a run that stopped, and its losses."""

    @cache
    def run(mesh: str, *, tied: bool) -> tuple[Path, list[float]]:
        directory = tmp_path_factory.mktemp("kept")
        found = losses(mesh, tied=tied, steps=BEFORE, directory=directory, resume=False)
        return directory, found

    return run


@pytest.mark.parametrize(
    ("before", "going_on"), rotated(list(MESHES), [*product(MESHES, (True, False))], 2)
)
def test_losses_go_on_on_every_mesh(before, going_on, interrupted, tmp_path) -> None:
    after, tied = going_on
    kept, first = interrupted(before, tied=tied)
    shutil.copytree(kept, tmp_path / "kept")
    second = losses(after, tied=tied, steps=STEPS, directory=tmp_path / "kept", resume=True)
    assert first + second == pytest.approx(unbroken(tied=tied), rel=2e-5)
