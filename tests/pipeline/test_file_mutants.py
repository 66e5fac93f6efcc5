"""Mutants of files are refused or run as legal programs; those that once did neither stay here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwright.errors import PipelineError
from tests.pipeline.interpreter import interpret
from tests.pipeline.mutants import SUBJECTS, closed, inputs, mutant, opened, run, subjects
from tests.pipeline.mutation import mutate

COUNT = 110
File = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The good files."""
    folder = tmp_path_factory.mktemp("mutants")
    subjects(folder)
    return folder


@pytest.mark.parametrize("name", SUBJECTS)
def test_the_good_files_run(folder: Path, name: str) -> None:
    assert len(run(folder / f"{name}.json")) in (2, 4)


@pytest.mark.parametrize("name", SUBJECTS)
def test_the_interpreter_gives_what_a_run_gives(folder: Path, name: str) -> None:
    import torch

    data = (folder / f"{name}.json").read_bytes()
    rate = torch.tensor(1e-2, dtype=torch.float64)
    calls = [{"x": inputs(k), "lr": rate} for k in range(2)]
    with torch.no_grad():
        expected = interpret(data, folder, calls)
    for found, wanted in zip(run(folder / f"{name}.json"), expected, strict=True):
        torch.testing.assert_close(found, wanted)


def test_a_number_gives_the_same_mutant(folder: Path) -> None:
    assert mutant(folder, 7) == mutant(folder, 7)
    assert mutant(folder, 7) != mutant(folder, 8)


@pytest.mark.processes
def test_mutants_are_refused_or_legal() -> None:
    tally = mutate(0, COUNT)
    assert tally.failures == []
    assert sum(tally.verdicts.values()) == COUNT


def update(file: File) -> File:
    found: File = next(t for t in file["supertasks"].values() if t.get("phase") == "update")
    return found


def other_operand(file: File) -> None:
    """The lists of the optimizer's update are of tensors of different sizes."""
    node = next(n for n in update(file)["data"]["nodes"] if "_fused_adamw" in n["op"])
    node["args"][0].reverse()


def fewer_operands(file: File) -> None:
    node = next(n for n in update(file)["data"]["nodes"] if "_fused_adamw" in n["op"])
    node["args"][2].pop()


def unknown_key_of_a_structure(file: File) -> None:
    arguments = file["metadata"]["structure"]["inputs"]
    arguments["parameters"][0]["value"]["items"] = []


def nameless_parameter(file: File) -> None:
    file["metadata"]["structure"]["inputs"]["parameters"][0]["name"] = ""


@pytest.mark.parametrize(
    "change", [other_operand, fewer_operands, nameless_parameter, unknown_key_of_a_structure]
)
def test_what_was_once_believed_or_crashed_is_refused(
    folder: Path, change: Callable[[File], None]
) -> None:
    file = opened(json.loads((folder / "training.json").read_text()))
    change(file)
    (folder / "changed.json").write_text(json.dumps(closed(file)))
    with pytest.raises(PipelineError):
        run(folder / "changed.json")
