"""``shardwright simulate``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import Result
from torch import nn
from typer.testing import CliRunner

import shardwright as sw
from shardwright.cli.app import app
from shardwright.clusters import Cluster
from shardwright.costs.tasks import TaskTime, TaskTimes, fingerprint_tasks
from tests.runtime.linear_step import linear_step
from tests.runtime.sketch import chain


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    linear_step("1f1b", microbatches=4).save(tmp_path / "step.json")
    chain(2).save(tmp_path / "model.json")
    return tmp_path


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)])


def test_a_step(folder: Path) -> None:
    options = ("--calls", 3, "--timeline", "--trace", folder / "trace.json")
    result = invoke(folder / "step.json", *options)
    assert result.exit_code == 0, result.output
    assert "a step takes" in result.output
    assert "3 of them" in result.output
    assert "recv with d1" in result.output
    assert "optimizer" in result.output
    tasks = {e["name"] for e in json.loads((folder / "trace.json").read_text())["traceEvents"]}
    assert {"F0.0", "send.h1.0@d1", "U1.0"} <= tasks


def test_a_model_on_other_machines(folder: Path) -> None:
    Cluster.of(2, 1).save(folder / "cluster.yaml")
    result = invoke(folder / "model.json", "--cluster", folder / "cluster.yaml")
    assert result.exit_code == 0, result.output
    assert "a call takes" in result.output


def test_a_bundle_is_its_first_pipeline(folder: Path) -> None:
    programs = sw.capture(nn.Linear(4, 4), (torch.randn(3, 4),), dynamic={"input": {0: "batch"}})
    sw.build(programs, sw.plan(programs, devices=1)).save(folder / "bundle")
    result = invoke(folder / "bundle")
    assert result.exit_code == 0, result.output
    assert "a call takes" in result.output


def test_too_few_machines(folder: Path) -> None:
    Cluster.of(1).save(folder / "cluster.yaml")
    result = invoke(folder / "step.json", "--cluster", folder / "cluster.yaml")
    assert result.exit_code == 1
    assert "no device slot 'd1'" in result.output


def test_times_that_were_kept(folder: Path) -> None:
    pipeline = chain(2)
    tasks = {"d0.0": TaskTime(2.0, 0), "d1.0": TaskTime(3.0, 0)}
    TaskTimes(tasks, fingerprint_tasks(pipeline)).save(folder / "times.json")
    result = invoke(folder / "model.json", "--times", folder / "times.json")
    assert result.exit_code == 0, result.output
    assert "a call takes 5 s" in result.output
    result = invoke(folder / "step.json", "--times", folder / "times.json")
    assert result.exit_code == 1
    assert "measured of the supertasks of another pipeline" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--measure", "--times", "a.json"), "leave one of them out"),
        (("--save-times", "a.json"), "give that too"),
        (("--threads", "2"), "give --measure too"),
        (("--times", "a.json", "--threads", "2"), "give --measure too"),
    ],
)
def test_times_come_from_one_place(folder: Path, options: tuple[str, ...], message: str) -> None:
    result = invoke(folder / "model.json", *options)
    assert result.exit_code == 1
    assert message in result.output


@pytest.mark.processes
def test_by_measured_times(folder: Path) -> None:
    times = folder / "times.json"
    result = invoke(folder / "model.json", "--measure", "--save-times", times)
    assert result.exit_code == 0, result.output
    assert "a call takes" in result.output
    again = invoke(folder / "model.json", "--times", times)
    assert again.stdout == result.stdout
