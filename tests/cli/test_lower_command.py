"""``shardwright lower``, and what other commands do with lowered files."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwright.pipeline import Pipeline
from tests.cli.commands import invoke, succeed

MODEL = """
import torch

def make():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 8) for _ in range(4)]
    return torch.nn.Sequential(*layers).eval(), (torch.ones(3, 8),), {}
"""


@pytest.fixture
def lowered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "lowered_model.py").write_text(MODEL)
    succeed("build", "lowered_model.py:make", "--devices", 2, "-o", "a.pipeline.json")
    assert "2 device slots" in succeed("lower", "a.pipeline.json", "-o", "b.pipeline.json")
    return tmp_path / "b.pipeline.json"


def test_it_writes_a_file_of_lowered_tasks(lowered: Path) -> None:
    kinds = {task.kind for task in Pipeline.load(lowered).supertasks.values()}
    assert "dfg" in kinds
    assert "FX" not in kinds
    assert "OK" in succeed("check", lowered, "--weights")


def test_show_prints_the_calls(lowered: Path) -> None:
    text = succeed("show", lowered, "--task", "d0.0")
    assert text.startswith("lowered d0.0:")
    assert "gemm(%v0, %v1, %v2, -)" in text
    assert "send/recv" in succeed("show", lowered)


def test_show_prints_where_the_values_of_a_task_lie(lowered: Path) -> None:
    text = succeed("show", lowered, "--task", "d0.0", "--memory")
    assert text.startswith("plan d0.0: 2 calls, arena ")
    assert "gemm(%v0 @v0, %v1 @v1, %v2 @v2, -)" in text
    said = invoke("show", lowered, "--task", "input", "--memory").output
    assert "'input' is no lowered supertask" in said
    unlowered = invoke("show", "a.pipeline.json", "--task", "d0.0", "--memory").output
    assert "lower the pipeline first" in unlowered
    assert "name a lowered one with --task" in invoke("show", lowered, "--memory").output


def test_run_runs_it(lowered: Path) -> None:
    x = torch.randn(3, 8)
    save_file({"input": x}, lowered.parent / "in.safetensors")
    succeed("run", lowered, "--inputs", "in.safetensors", "--output", "out.st", "--in-process")
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    expected = model(x).detach()
    found = load_file(lowered.parent / "out.st")["output"]
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
