import json
import sys
import types
from pathlib import Path

import pytest

from shardwright.errors import RunError
from shardwright.training.logs import JsonLines, StepReport, TensorBoard


def report(step: int, **more: object) -> StepReport:
    given = {"numbers": {"loss": 1.5}, "rates": {"lr": 0.1}, "seconds": 0.5, "samples": 8} | more
    return StepReport(step, 0, 1.5, **given)  # type: ignore[arg-type]


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_row_is_in_the_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "log.jsonl"
    log = JsonLines(path, after=0)
    log.step(report(1))
    log.step(report(2, tokens=512, evaluation={"loss": 2.0}, memory={"d0": 100}))
    first = {"step": 1, "epoch": 0, "loss": 1.5, "lr": 0.1, "seconds": 0.5}
    second = first | {"step": 2, "tokens_per_second": 1024.0}
    assert rows(path) == [
        first | {"samples_per_second": 16.0},
        second | {"evaluation": {"loss": 2.0}, "memory": {"d0": 100}},
    ]
    log.close()


def test_a_resumed_log_has_each_step_once(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = JsonLines(path, after=0)
    for step in (1, 2, 3):
        log.step(report(step))
    log.close()
    path.write_text(path.read_text() + '{"step": 4, "lo')
    log = JsonLines(path, after=2)
    log.step(report(3, samples=9))
    log.close()
    assert [(row["step"], row["samples_per_second"]) for row in rows(path)] == [
        (1, 16.0),
        (2, 16.0),
        (3, 18.0),
    ]


def test_a_new_run_begins_a_new_log(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for _ in range(2):
        log = JsonLines(path, after=0)
        log.step(report(1))
        log.close()
    assert len(rows(path)) == 1


def test_a_log_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="cannot be written: Is a directory"):
        JsonLines(tmp_path, after=0)


def test_tensorboard_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(RunError, match="not installed; install it, or use log="):
        TensorBoard(tmp_path)


def test_tensorboard_gets_every_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[str, float, int]] = []

    class SummaryWriter:
        def __init__(self, directory: str) -> None:
            assert directory == str(tmp_path)

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, value, step))

        def close(self) -> None:
            written.append(("closed", 0, 0))

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    log = TensorBoard(tmp_path)
    log.step(report(3, evaluation={"accuracy": 0.5}))
    log.close()
    assert ("loss", 1.5, 3) in written
    assert ("lr", 0.1, 3) in written
    assert ("evaluation/accuracy", 0.5, 3) in written
    assert written[-1][0] == "closed"
