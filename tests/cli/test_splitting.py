"""``--devices``, ``--policy`` and ``--mesh``."""

from pathlib import Path

import pytest

from shardwright.cli.splitting import parse_mesh, plan_as_told
from shardwright.cli.userfiles import UserFiles
from shardwright.errors import PlanError
from tests.graphs import language_model


@pytest.mark.parametrize(
    ("devices", "policy", "mesh", "expected"),
    [
        (None, None, None, "pipeline, 2 slots"),
        (3, None, None, "pipeline, 3 slots"),
        (2, "tensor", None, "tensor, 2 slots"),
        (None, None, "pipeline=2, tensor=2", "pipeline 2 × tensor 2, 4 slots"),
        (2, None, "data=2", "data 2, 2 slots"),
    ],
)
def test_the_options_ask_for_a_plan(
    devices: int | None, policy: str | None, mesh: str | None, expected: str
) -> None:
    made = plan_as_told(language_model(), UserFiles(), devices, policy, mesh)
    assert str(made).splitlines()[0] == f"plan for language_model: {expected}"


def test_a_policy_may_be_a_function_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "policy_file.py"
    path.write_text("def nothing(graph, resource):\n    return graph\n")
    made = plan_as_told(language_model(), UserFiles(), 3, f"{path}:nothing", None)
    assert str(made).splitlines()[0] == "plan for language_model: nothing, 3 slots"


@pytest.mark.parametrize(
    "text", ["", "tensor", "tensor=", "=2", "tensor=two", "a=1,,b=2", "a=1,a=2"]
)
def test_a_mesh_that_does_not_read_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match=r"the mesh '.*' is wrong at .*pipeline=2,tensor=2"):
        parse_mesh(text)


def test_a_policy_and_a_mesh_are_too_much() -> None:
    with pytest.raises(PlanError, match="either --policy or --mesh"):
        plan_as_told(language_model(), UserFiles(), None, "tensor", "data=2")
