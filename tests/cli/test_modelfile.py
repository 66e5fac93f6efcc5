from pathlib import Path

import pytest
import torch

from shardwright.cli.modelfile import load_example
from shardwright.errors import CaptureError

SOURCE = """
import torch
from neighbour import WIDTH

def make():
    return torch.nn.Linear(WIDTH, 2), (torch.ones(3, WIDTH),), None

def incomplete():
    return torch.nn.Linear(4, 2), torch.ones(3, 4)

def failing():
    return 1 / 0
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "neighbour.py").write_text("WIDTH = 4\n")
    path = tmp_path / "some_model.py"
    path.write_text(SOURCE)
    return path


def test_the_function_gives_a_model_and_its_arguments(source: Path) -> None:
    model, args, kwargs = load_example(f"{source}:make")
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
        load_example(target.format(source=source))
