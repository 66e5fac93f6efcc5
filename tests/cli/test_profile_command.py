"""``shardwright profile``."""

from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from shardwright.cli.app import app
from shardwright.profiling import Profile

SOURCE = """
import torch

def layers():
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])

def make():
    return layers().eval(), (torch.ones(4, 8),), {}

def train():
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x, y):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step, [tuple(torch.randn(2, 8, 8)) for _ in range(4)]
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "profiled_program.py").write_text(SOURCE)
    return tmp_path


def invoke(function: str, *options: object) -> Result:
    target = f"profiled_program.py:{function}"
    return CliRunner().invoke(app, ["profile", target, "--n-iter", "1", *map(str, options)])


def succeed(function: str, *options: object) -> str:
    result = invoke(function, *options)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_model_is_profiled_and_written(folder: Path) -> None:
    text = succeed("make", "-o", "profile.json", "--cache", "timings.json")
    assert text.startswith("profile of Sequential: 4 layers, 2 of them distinct")
    assert str(Profile.load("profile.json")) + "\n" == text
    assert (folder / "timings.json").exists()
    assert not (folder / "cache").exists()


def test_a_training_step_is_profiled_on_a_microbatch(folder: Path) -> None:
    succeed("train", "--microbatches", 4, "-o", "profile.json", "--depth", 1)
    layers = {layer.name: layer for layer in Profile.load("profile.json").layers}
    assert layers["3"].kind == "Linear"
    assert layers["3"].input_size == pytest.approx(2 * 8 * 4 / 1e6)
    assert (folder / "cache" / "shardwright" / "timings.json").exists()


def test_the_granularity_and_recomputation_are_as_told(folder: Path) -> None:
    whole = succeed("make", "--depth", 0, "--no-cache")
    assert whole.startswith("profile of Sequential: 1 layer, 1 of them distinct")
    text = succeed("make", "--basic-block", "Linear", "--recompute", "--no-cache")
    assert "backward with recomputation" in text
    assert text.splitlines()[6].split()[:3] == ["0", "Linear", "1"]
    assert not (folder / "cache").exists()


def test_a_chart_is_drawn(folder: Path) -> None:
    pytest.importorskip("matplotlib")
    succeed("make", "--plot", "chart.svg", "--no-cache")
    assert (folder / "chart.svg").read_bytes().startswith(b"<?xml")


def test_what_fails_is_one_line() -> None:
    result = invoke("make", "--basic-block", "Conv2d")
    assert result.exit_code == 1
    assert "ProfileError: basic_blocks: no node is in a module of class Conv2d" in result.output
    assert len(result.output.strip().splitlines()) <= 3
