from pathlib import Path

import pytest
import torch

from shardwright.errors import RunError, WeightError
from shardwright.training.checkpoint import (
    Checkpoints,
    Manifest,
    Position,
    find_checkpoint,
    read_manifest,
    read_rates,
    write_manifest,
    write_rates,
)
from shardwright.training.dcp import TensorPiece, write_index, write_pieces


def write(checkpoints: Checkpoints, step: int) -> Path:
    path = checkpoints.begin(step)
    tensor = torch.full((8,), float(step))
    write_index(path, write_pieces(path, 0, {TensorPiece.whole("w", tensor): tensor}))
    write_rates(path, {"rates": {"lr": 0.1}})
    write_manifest(path, Position(step), ("w",))
    return checkpoints.finish(path)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_the_latest_two_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "made" / "if needed")
    assert checkpoints.latest() is None
    for step in (9, 10, 1_000_000, 11):
        write(checkpoints, step)
    assert names(checkpoints.directory) == ["step_000011", "step_1000000"]
    assert checkpoints.latest() == checkpoints.directory / "step_1000000"
    assert find_checkpoint(checkpoints.directory) == checkpoints.latest()
    assert find_checkpoint(checkpoints.directory / "step_000011").name == "step_000011"


def test_an_unfinished_one_is_no_checkpoint(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    write(checkpoints, 1)
    checkpoints.begin(2)
    checkpoints.begin(7)
    assert checkpoints.latest() == tmp_path / "step_000001"
    write(checkpoints, 2)
    assert names(tmp_path) == ["step_000001", "step_000002"]


@pytest.mark.parametrize("file", [".metadata", "training.json", "rates.pt", "__0_0.distcp"])
@pytest.mark.parametrize("act", ["remove", "shorten"])
def test_a_damaged_one_is_passed_over(tmp_path: Path, file: str, act: str) -> None:
    checkpoints = Checkpoints(tmp_path)
    good, bad = write(checkpoints, 1), write(checkpoints, 2)
    content = (bad / file).read_bytes()
    (bad / file).unlink()
    if act == "shorten":
        (bad / file).write_bytes(content[: len(content) // 2])
    assert checkpoints.latest() == good
    assert write(checkpoints, 2) == bad, "it is replaced when the run comes there again"
    assert checkpoints.complete() == [good, bad]


def test_the_manifest_comes_back(tmp_path: Path) -> None:
    position = Position(step=7, epoch=2, batch=3, draws=28)
    write_manifest(tmp_path, position, ("fc.weight", "fc.bias"))
    assert read_manifest(tmp_path) == Manifest(1, position, ("fc.weight", "fc.bias"))


def test_a_manifest_of_another_version(tmp_path: Path) -> None:
    write_manifest(tmp_path, Position(), ())
    file = tmp_path / "training.json"
    file.write_text(file.read_text().replace('"version": 1', '"version": 7'))
    with pytest.raises(WeightError, match="version 7; this release reads 1"):
        read_manifest(tmp_path)


def test_a_directory_without_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match="no complete checkpoint"):
        find_checkpoint(tmp_path)


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="no checkpoint can be written"):
        Checkpoints(tmp_path / "file" / "below").begin(1)


def test_a_schedulers_state_comes_back(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5])
    with pytest.raises(WeightError, match=r"rates\.pt cannot be read"):
        read_rates(tmp_path)
    write_rates(tmp_path, scheduler.state_dict())
    assert read_rates(tmp_path) == scheduler.state_dict()


def test_a_scheduler_that_would_run_code_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="function from step to factor"):
        write_rates(tmp_path, {"gamma": Path})
    with pytest.raises(RunError, match="function from step to factor"):
        write_rates(tmp_path, {"gamma": lambda step: step})
