"""``shardwright profile``."""

from pathlib import Path

import pytest

from shardwright.costs import Profile
from tests.cli.commands import refused, succeed

pytestmark = pytest.mark.usefixtures("program_folder")


def profiled(function: str, *options: object) -> str:
    return succeed("profile", f"user_program.py:{function}", "--n-iter", 1, *options)


def test_a_model_is_profiled_and_written(program_folder: Path) -> None:
    text = profiled("make", "-o", "profile.json", "--cache", "timings.json")
    assert text.startswith("profile of Sequential: 4 layers, 2 of them distinct")
    assert str(Profile.load("profile.json")) + "\n" == text
    assert (program_folder / "timings.json").exists()
    assert not (program_folder / "cache").exists()


def test_a_training_step_is_profiled_on_a_microbatch(program_folder: Path) -> None:
    profiled("train", "--microbatches", 4, "-o", "profile.json", "--depth", 1)
    layers = {layer.name: layer for layer in Profile.load("profile.json").layers}
    assert layers["3"].kind == "Linear"
    assert layers["3"].input_size == pytest.approx(2 * 8 * 4 / 1e6)
    assert (program_folder / "cache" / "shardwright" / "timings.json").exists()


def test_the_granularity_and_recomputation_are_as_told(program_folder: Path) -> None:
    whole = profiled("make", "--depth", 0, "--no-cache")
    assert whole.startswith("profile of Sequential: 1 layer, 1 of them distinct")
    text = profiled("make", "--basic-block", "Linear", "--recompute", "--no-cache")
    assert "backward with recomputation" in text
    assert text.splitlines()[6].split()[:3] == ["0", "Linear", "1"]
    assert not (program_folder / "cache").exists()


def test_a_chart_is_drawn(program_folder: Path) -> None:
    pytest.importorskip("matplotlib")
    profiled("make", "--plot", "chart.svg", "--no-cache")
    assert (program_folder / "chart.svg").read_bytes().startswith(b"<?xml")


def test_what_fails_is_one_line() -> None:
    found = refused("profile", "user_program.py:make", "--basic-block", "Conv2d")
    assert "ProfileError: basic_blocks: no node is in a module of class Conv2d" in found
    assert len(found.strip().splitlines()) <= 3


def test_a_chart_of_no_known_format_is_refused_before_anything_is_measured(
    program_folder: Path,
) -> None:
    found = refused(
        "profile", "user_program.py:make", "--plot", "chart.gif", "--cache", "timings.json"
    )
    assert "a chart cannot be written as 'chart.gif'" in found
    assert not (program_folder / "timings.json").exists()


def test_a_cache_and_none_contradict_each_other(program_folder: Path) -> None:
    found = refused("profile", "user_program.py:make", "--cache", "timings.json", "--no-cache")
    assert "--cache keeps what --no-cache does not; leave one of them out" in found
    assert not (program_folder / "timings.json").exists()
