"""``shardwright draw``."""

from pathlib import Path
from typing import Any

import pytest

from shardwright.cli import userfiles
from shardwright.ir import IRGraph
from shardwright.planner import plan
from shardwright.planning import Plan
from tests.cli.commands import refused, succeed

pytestmark = pytest.mark.usefixtures("program_folder")


def drawn(function: str, *options: object) -> str:
    """The DOT text that the command writes."""
    assert succeed("draw", f"user_program.py:{function}", "-o", "graph.dot", *options) == ""
    return Path("graph.dot").read_text()


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
    succeed("plan", "user_program.py:train", *words, "-o", "plan.json")
    text = drawn("train", "--plan", "plan.json")
    assert "<B>Backward</B>" in text
    assert "stage 1 on d1" in text
    assert "<B>adamw_step</B>" in drawn("train", "--microbatches", 2)


def test_times_are_a_profiles() -> None:
    words = ("--n-iter", 1, "--no-cache", "-o", "profile.json")
    succeed("profile", "user_program.py:make", *words)
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
    succeed("profile", "user_program.py:make", *words)
    seen: list[object] = []

    def planning(graph: IRGraph, **asked: Any) -> Plan:
        seen.append(asked.get("profile"))
        return plan(graph, **asked)

    monkeypatch.setattr(userfiles, "plan", planning)
    drawn("make", "--profile", "profile.json", *options)
    assert [found is not None for found in seen] == [planned_by]


def test_what_cannot_be_drawn_is_one_line(program_folder: Path) -> None:
    words = ("draw", "user_program.py:make", "-o")
    assert "DrawError: a graph cannot be drawn as 'graph.gif'" in refused(*words, "graph.gif")
    assert "no plan can be read" in refused(*words, "graph.dot", "--plan", "none.json")
    assert "no profile can be read" in refused(*words, "graph.dot", "--profile", "none.json")
    assert not list(program_folder.glob("graph*"))
