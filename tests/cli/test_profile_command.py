"""``shardwright profile``."""

from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from shardwright.cli.app import app
from shardwright.profiling import Profile
from tests.cli.program import put_program


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return put_program(tmp_path, monkeypatch)


def invoke(function: str, *options: object) -> Result:
    target = f"user_program.py:{function}"
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


def test_a_chart_of_no_known_format_is_refused_before_anything_is_measured(folder: Path) -> None:
    result = invoke("make", "--plot", "chart.gif", "--cache", "timings.json")
    assert result.exit_code == 1
    assert "a chart cannot be written as 'chart.gif'" in result.stderr
    assert not (folder / "timings.json").exists()
