"""The options that say how a graph is split, for models and for training steps."""

from pathlib import Path

import pytest
import torch
from rich.console import Console

from shardwright.cli import options
from shardwright.cli.options import PlanOptions, parse_mesh
from shardwright.cli.steps import Steps
from shardwright.cli.userfiles import Example, UserFiles, UserTraining, plan_program
from shardwright.errors import PlanError
from shardwright.ir import IRGraph
from shardwright.pipeline.bundle import INDEX
from shardwright.planner import AUTO, POLICIES
from shardwright.planning import Plan
from shardwright.planning.options import RECOMPUTE
from shardwright.planning.partitioners import PARTITIONERS
from shardwright.schedules import KINDS


def model(width: int = 8) -> Example:
    layers = [torch.nn.Linear(width, width) for _ in range(4)]
    return Example(torch.nn.Sequential(*layers), (torch.ones(4, width),), {})


def program() -> UserTraining:
    net = model().model
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return UserTraining(step, [torch.ones(8, 8)])


def told(
    made: Example | UserTraining, plan: Path | None = None, **given: object
) -> tuple[IRGraph, Plan]:
    steps = Steps(Console(quiet=True))
    return plan_program(made, UserFiles(), PlanOptions(**given), steps, plan)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "pipeline, 2 slots"),
        ({"devices": 3}, "pipeline, 3 slots"),
        ({"devices": 2, "policy": "tensor"}, "tensor, 2 slots"),
        ({"mesh": "pipeline=2, tensor=2"}, "pipeline 2 × tensor 2, 4 slots"),
        ({"devices": 2, "mesh": "data=2"}, "data 2, 2 slots"),
    ],
    ids=str,
)
def test_the_options_ask_for_a_plan(options: dict[str, object], expected: str) -> None:
    _, made = told(model(), **options)
    assert str(made).splitlines()[0].endswith(expected)


def test_a_training_step_is_planned_for_its_microbatches() -> None:
    graph, made = told(program(), mesh="pipeline=2,data=2", microbatches=2, schedule="zb-h1")
    assert graph.values[graph.inputs[0]].shape == (4, 8)
    assert (made.training.microbatches, made.training.schedule) == (2, "zb-h1")


def test_a_policy_may_be_a_function_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "policy_file.py"
    path.write_text("def nothing(graph, resource):\n    return graph\n")
    _, made = told(model(), devices=3, policy=f"{path}:nothing")
    assert made.policy == "nothing"
    assert len(made.devices) == 3


@pytest.mark.parametrize("kind", [model, program])
def test_a_plan_in_a_file_is_taken_as_it_is(kind: type, tmp_path: Path) -> None:
    _, made = told(kind(), devices=2)
    made.save(tmp_path / "plan.json")
    assert told(kind(), plan=tmp_path / "plan.json")[1] == made


def test_a_plan_of_another_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    told(model(), devices=2)[1].save(path)
    with pytest.raises(PlanError, match=r"inputs were .*\[4, 8\], here they are .*\[4, 16\]"):
        told(model(16), plan=path)
    with pytest.raises(PlanError, match="is of a model; plan the training step"):
        told(program(), plan=path)
    told(program(), devices=2)[1].save(path)
    with pytest.raises(PlanError, match="the plan was made for the graph 'train_step'"):
        told(model(), plan=path)


def test_options_beside_a_plan_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    told(model(), devices=2)[1].save(path)
    with pytest.raises(PlanError, match="settles what --devices, --schedule would; leave that out"):
        told(model(), plan=path, devices=2, schedule="1f1b")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "tensor", "mesh": "data=2"}, "either --policy or --mesh"),
        ({"devices": 2, "cluster": Path("c.yaml")}, "either --devices or --cluster"),
        ({"microbatches": 2}, "is no training step, but microbatches=2 is for one"),
        ({"devices": 9}, "9 stages, but the graph"),
    ],
    ids=str,
)
def test_what_cannot_be_asked_for(options: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        told(model(), **options)


@pytest.mark.parametrize(
    "text", ["", "tensor", "tensor=", "=2", "tensor=two", "a=1,,b=2", "a=1,a=2"]
)
def test_a_mesh_that_does_not_read_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match=r"the mesh '.*' is wrong at .*pipeline=2,tensor=2"):
        parse_mesh(text)


def test_help_names_what_there_is() -> None:
    assert (AUTO, tuple(POLICIES)) == (options.AUTO, options.POLICIES)
    assert (tuple(PARTITIONERS), tuple(RECOMPUTE)) == (options.PARTITIONERS, options.RECOMPUTE)
    assert tuple(KINDS) == options.SCHEDULES
    assert options.BUNDLE_INDEX == INDEX
