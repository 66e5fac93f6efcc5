"""``shardwright draw``."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from shardwright.cli import splitting
from shardwright.cli.app import app
from shardwright.ir import IRGraph
from shardwright.planning import Plan, plan
from tests.cli.program import put_program


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return put_program(tmp_path, monkeypatch)


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


def drawn(function: str, *options: object) -> str:
    """The DOT text that the command writes."""
    result = invoke("draw", f"user_program.py:{function}", "-o", "graph.dot", *options)
    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    return Path("graph.dot").read_text()


def refused(*arguments: object) -> str:
    result = invoke("draw", *arguments)
    assert result.exit_code == 1
    return result.stderr


def test_a_model_is_drawn_with_estimated_times() -> None:
    text = drawn("make")
    assert "<B>linear ×4</B>" in text
    assert "times estimated from shapes for cpu-core" in text
    assert "boxes by time" in text
    assert "BGCOLOR" not in text


def test_stages_are_coloured() -> None:
    text = drawn("make", "--devices", 2)
    assert "stage 0 on d0" in text
    assert "stage 1 on d1" in text
    assert drawn("make", "--devices", 2, "--no-fold").count("<B>linear</B>") == 4
    assert drawn("make", "--mesh", "pipeline=4", "--depth", 0).count("subgraph") == 0


def test_a_training_step_is_drawn_by_its_plan() -> None:
    words = ("--mesh", "pipeline=2", "--microbatches", 2)
    result = invoke("plan", "user_program.py:train", *words, "-o", "plan.json")
    assert result.exit_code == 0
    text = drawn("train", "--plan", "plan.json")
    assert "<B>Backward</B>" in text
    assert "stage 1 on d1" in text
    assert "<B>adamw_step</B>" in drawn("train", "--microbatches", 2)


def test_times_are_a_profiles() -> None:
    words = ("--n-iter", 1, "--no-cache", "-o", "profile.json")
    assert invoke("profile", "user_program.py:make", *words).exit_code == 0
    text = drawn("make", "--profile", "profile.json", "--devices", 2)
    assert "times measured on" in text
    assert "or estimated where nothing was measured" in text


@pytest.mark.parametrize(
    ("options", "planned_by"),
    [
        (("--devices", 2, "--policy", "metis"), True),
        (("--devices", 2, "--policy", "auto"), True),
        (("--mesh", "pipeline=2", "--policy", "pipedream"), True),
        (("--devices", 2), False),
        (("--devices", 2, "--policy", "tensor"), False),
    ],
)
def test_a_policy_that_goes_by_times_has_the_profile(
    options: tuple[object, ...], planned_by: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--n-iter", 1, "--no-cache", "-o", "profile.json")
    assert invoke("profile", "user_program.py:make", *words).exit_code == 0
    seen: list[object] = []

    def planning(graph: IRGraph, **asked: Any) -> Plan:
        seen.append(asked.get("profile"))
        return plan(graph, **asked)

    monkeypatch.setattr(splitting, "plan", planning)
    drawn("make", "--profile", "profile.json", *options)
    assert [found is not None for found in seen] == [planned_by]


def test_what_cannot_be_drawn_is_one_line(folder: Path) -> None:
    target = "user_program.py:make"
    assert "DrawError: a graph cannot be drawn as 'graph.gif'" in refused(target, "-o", "graph.gif")
    assert "no plan can be read" in refused(target, "-o", "graph.dot", "--plan", "none.json")
    assert "no profile can be read" in refused(target, "-o", "graph.dot", "--profile", "none.json")
    assert not list(folder.glob("graph*"))
