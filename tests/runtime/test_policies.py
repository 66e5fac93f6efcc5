"""Every policy by name: its plans survive a file, and what they run is what eager computes."""

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from shardwright.building import build
from shardwright.ir import IRGraph
from shardwright.pipeline import Pipeline
from shardwright.pipeline import check as check_file
from shardwright.planner import POLICIES, plan
from shardwright.planning import Plan
from shardwright.planning.partitioners import PARTITIONERS
from shardwright.runtime import verify
from shardwright.schedules import KINDS
from shardwright.tracing import capture
from shardwright.training import train
from shardwright.training.data import Loading
from shardwright.training.program import TrainingProgram
from tests.rounding import BITS
from tests.runtime.programs import GPT, gpt, tokens
from tests.turns import rotated

STAGED = ("pipeline", *PARTITIONERS)
"""Policies that only cut between nodes, so that results are equal bit for bit. Replicas of a stage,
of `pipedream`, share rows: a product of fewer rows may round otherwise."""


class Branches(nn.Module):
    """Two branches of different lengths that meet again, and a residual around all."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        self.right = nn.Linear(16, 16)
        self.last = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.last(self.left(x) * self.right(x).tanh())


def models() -> dict[str, tuple[nn.Module, tuple[torch.Tensor, ...]]]:
    torch.manual_seed(0)
    return {
        "branches": (Branches().eval(), (torch.randn(8, 16),)),
        "gpt": (GPT(0.0).eval(), (torch.randint(0, 20, (8, 6)),)),
    }


@cache
def captured(kind: str) -> tuple[nn.Module, tuple[torch.Tensor, ...], IRGraph]:
    """A model, which no test changes, the arguments of a call, and its graph."""
    model, args = models()[kind]
    return model, args, capture(model, args)


@cache
def step_graph(microbatches: int) -> IRGraph:
    """The step of `gpt` on a microbatch."""
    batch = Loading(tokens(1), seed=0).first()
    return TrainingProgram(gpt().step, batch, microbatches=microbatches, seed=0).graph


def through_a_file(made: Plan, folder: Path) -> Plan:
    made.save(folder / "plan.json")
    again = Plan.load(folder / "plan.json")
    assert again == made
    return again


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["branches", "gpt"])
def test_a_model(kind: str, policy: str, devices: int, tmp_path: Path) -> None:
    model, args, graph = captured(kind)
    made = through_a_file(plan(graph, devices, policy), tmp_path)
    pipeline = build(graph, made)
    pipeline.save(tmp_path / "model.json")
    check_file(Pipeline.load(tmp_path / "model.json"))
    staged = BITS if policy == "pipedream" else 0.0
    tolerance = staged if policy in STAGED else 1e-5
    verify(pipeline, model, args, tolerance=tolerance, in_process=True)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_training_step(policy: str, tmp_path: Path) -> None:
    """Two microbatches on two slots, and an evaluation of whole batches on the same slots."""
    program, reference = gpt(), gpt()
    graph = step_graph(2)
    made = through_a_file(plan(graph, 2, policy, microbatches=2), tmp_path)
    result = train(
        program.step,
        tokens(3),
        plan=made,
        epochs=1,
        in_process=True,
        quiet=True,
        evaluate=program.evaluate,
        eval_data=tokens(1, seed=5),
    )
    assert result.losses == pytest.approx(reference.loop(tokens(3)), rel=1e-4)
    reference.model.load_state_dict(result.state_dict())
    with torch.no_grad():
        expected = reference.evaluate(*tokens(1, seed=5)[0])
    assert result.evaluations[3] == pytest.approx(
        {name: number.item() for name, number in expected.items()}, rel=1e-5
    )


@pytest.mark.parametrize(("schedule", "policy"), rotated(KINDS, ["metis", "memory"]))
def test_partitions_under_every_schedule(schedule: str, policy: str) -> None:
    program, reference = gpt(), gpt()
    graph = step_graph(4)
    made = plan(graph, 2, policy, microbatches=4, schedule=schedule)
    result = train(program.step, tokens(2), plan=made, epochs=1, in_process=True, quiet=True)
    assert result.losses == pytest.approx(reference.loop(tokens(2)), rel=1e-4)
