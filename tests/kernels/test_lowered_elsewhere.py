"""A lowered file is read by processes that have lowered nothing: each test here has its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.lazy import SUPPLIED
from tests.clean_process import printed_by

RUN = "sw.run('low.json', torch.ones(2, 8), {}).sum().item()"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``low.json``, which sums to what ``expected`` holds."""
    folder = tmp_path_factory.mktemp("lowered")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)).eval()
    graph = sw.capture(model, (torch.ones(2, 8),))
    sw.lower(sw.build(graph, sw.plan(graph, devices=2))).save(folder / "low.json")
    (folder / "expected").write_text(str(model(torch.ones(2, 8)).sum().item()))
    return folder


@pytest.mark.parametrize(
    "imports",
    [
        "from shardwright.pipeline.pipeline import Pipeline",
        "from shardwright.pipeline import Pipeline",
        "from shardwright import Pipeline",
    ],
)
def test_a_lowered_file_is_loaded_whatever_was_imported(folder: Path, imports: str) -> None:
    code = f"{imports}\nprint(Pipeline.load('low.json'))"
    assert "dfg" in printed_by("python", "-c", code, folder=folder)


@pytest.mark.parametrize("how", ["in_process=True", "in_process=False"])
def test_a_lowered_file_runs_in_a_process_of_its_own(folder: Path, how: str) -> None:
    code = f"import torch, shardwright as sw\nif __name__ == '__main__': print({RUN.format(how)})"
    (folder / "script.py").write_text(code)
    found = float(printed_by("python", "script.py", folder=folder))
    assert found == pytest.approx(float((folder / "expected").read_text()), rel=1e-5)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("check", "low.json"), "OK: "),
        (("show", "low.json"), "dfg"),
        (("run", "low.json", "--random", "--in-process"), "[2, 8]"),
        (("simulate", "low.json", "--measure"), "d0"),
    ],
)
def test_a_command_takes_a_lowered_file(folder: Path, command: tuple[str, ...], said: str) -> None:
    assert said in printed_by("shardwright", *command, folder=folder)


@pytest.mark.parametrize("what", SUPPLIED)
def test_what_a_folder_supplies_is_there_in_every_process(folder: Path, what: str) -> None:
    """Nothing else of the package was imported."""
    code = f"from shardwright.lazy import supplied\nprint(supplied({what!r}))"
    assert printed_by("python", "-c", code, folder=folder).strip()
