import sys
from pathlib import Path

import pytest
import torch

from shardwright.cli.userfiles import Example, UserFiles, UserTraining
from shardwright.errors import CaptureError, PlanError

SOURCE = """
import torch
from neighbour import WIDTH

def make():
    return torch.nn.Linear(WIDTH, 2), (torch.ones(3, WIDTH),), None

def incomplete():
    return torch.nn.Linear(4, 2), torch.ones(3, 4)

def failing():
    return 1 / 0

def policy(graph, resource):
    return graph.nothing
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "neighbour.py").write_text("WIDTH = 4\n")
    path = tmp_path / "some_model.py"
    path.write_text(SOURCE)
    return path


def test_the_function_gives_a_model_and_its_arguments(source: Path) -> None:
    model, args, kwargs = UserFiles().example(f"{source}:make")
    assert isinstance(model, torch.nn.Linear)
    assert [tuple(arg.shape) for arg in args] == [(3, 4)]
    assert kwargs == {}


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("{source}", "names no function"),
        ("{source}:", "names no function"),
        ("missing.py:make", "there is no Python file missing.py"),
        ("{source}:other", "defines no function other"),
        ("{source}:failing", "raised ZeroDivisionError: division by zero"),
        ("{source}:incomplete", r"must return \(model, args, kwargs\).*\(Linear, Tensor\)"),
    ],
)
def test_what_is_not_a_model_file_is_refused(source: Path, target: str, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        UserFiles().example(target.format(source=source))


def test_a_file_runs_once_for_a_model_and_a_policy(source: Path) -> None:
    files = UserFiles()
    files.example(f"{source}:make")
    module = sys.modules[source.stem]
    assert files.policy(f"{source}:policy").__name__ == "policy"
    assert sys.modules[source.stem] is module


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("{source}", "names no function"),
        ("missing.py:policy", "there is no Python file missing.py"),
        ("{source}:other", "defines no function other"),
    ],
)
def test_what_is_no_policy_is_refused(source: Path, target: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        UserFiles().policy(target.format(source=source))


def test_what_a_policy_raises_names_it(source: Path) -> None:
    policy = UserFiles().policy(f"{source}:policy")
    with pytest.raises(PlanError, match=r"some_model.py:policy raised AttributeError: .*nothing"):
        policy(object(), object())


def test_a_file_that_cannot_be_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken_model.py").write_text("1 / 0")
    with pytest.raises(CaptureError, match=r"broken_model.py raised ZeroDivisionError"):
        UserFiles().example(f"{tmp_path}/broken_model.py:make")


TRAINING = """
import torch
import types

def step_fn(x):
    return x

data = [1, 2]

def pair():
    return step_fn, data

def named():
    return {"step_fn": step_fn, "data": data, "scheduler": abs}

def item():
    return types.SimpleNamespace(step_fn=step_fn, data=data, evaluate=step_fn, eval_data=data)

def swapped():
    return data, step_fn

def misspelt():
    return {"step": step_fn, "data": data}

def model():
    return torch.nn.Linear(2, 2), (torch.ones(1, 2),), {}
"""


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "some_training.py"
    path.write_text(TRAINING)
    return path


def test_a_training_program_comes_in_three_forms(training: Path) -> None:
    files = UserFiles()
    assert files.training(f"{training}:pair").data == [1, 2]
    assert files.training(f"{training}:named").scheduler is abs
    found = files.training(f"{training}:item")
    assert found.evaluate is found.step_fn
    assert found.scheduler is None


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("swapped", r"it returned \(list, function\)"),
        ("misspelt", "a dict with step, data"),
        ("model", r"must return \(step_fn, data\).* it returned \(Linear, tuple, dict\)"),
    ],
)
def test_what_is_no_training_program(training: Path, function: str, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        UserFiles().training(f"{training}:{function}")


def test_a_function_gives_a_model_or_a_training_program(source: Path) -> None:
    source.write_text(
        SOURCE
        + """
def train():
    return print, [torch.ones(3)]

def both():
    return {"step_fn": print, "data": [torch.ones(3)]}
"""
    )
    assert isinstance(UserFiles().either(f"{source}:make"), Example)
    assert isinstance(UserFiles().either(f"{source}:train"), UserTraining)
    assert isinstance(UserFiles().either(f"{source}:both"), UserTraining)


def test_what_is_neither_a_model_nor_a_training_program_is_refused(source: Path) -> None:
    with pytest.raises(
        CaptureError,
        match=r"must return \(model, args, kwargs\), or \(step_fn, data\).*\(Linear, Tensor\)",
    ):
        UserFiles().either(f"{source}:incomplete")
