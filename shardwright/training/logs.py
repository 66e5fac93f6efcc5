"""What a run reports, and the files that keep it: JSON lines, TensorBoard.

Comes in: a `StepReport` after each step. What always holds: a log of JSON lines has one object a
step, in order, each step once: a run that is resumed goes on behind the step it resumes from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from shardwright.errors import RunError, WriteError


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step.

    step
        Its number, from 1 on; ``epoch`` from 0 on.
    numbers
        What the step function returned as numbers, by name.
    rates
        The learning rates that it used, by input of the graph.
    seconds
        From the end of the step before to its own.
    samples, tokens
        How many the batch has; ``tokens`` is None where the batch is not of tokens.
    evaluation
        The means over the evaluation's batches, by name, where one followed the step.
    memory
        Bytes of memory that each slot's process holds, where they were asked for.
    """

    step: int
    epoch: int
    loss: float
    numbers: dict[str, float]
    rates: dict[str, float]
    seconds: float
    samples: int
    tokens: int | None = None
    evaluation: dict[str, float] | None = None
    memory: dict[str, int] = field(default_factory=dict)

    @property
    def speed(self) -> tuple[float, str]:
        """How many a second, and of what."""
        count, noun = (self.samples, "samples") if self.tokens is None else (self.tokens, "tokens")
        return count / max(self.seconds, 1e-9), noun

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON has it; what says nothing is left out."""
        speed, noun = self.speed
        row: dict[str, Any] = {"step": self.step, "epoch": self.epoch, "loss": self.loss}
        row |= {name: number for name, number in self.numbers.items() if name not in row}
        row |= self.rates
        row |= {"seconds": round(self.seconds, 6), f"{noun}_per_second": round(speed, 1)}
        if self.evaluation is not None:
            row["evaluation"] = self.evaluation
        if self.memory:
            row["memory"] = self.memory
        return row


class RunLog(ABC):
    """Takes reports and notes until it is closed."""

    @abstractmethod
    def step(self, report: StepReport) -> None:
        """A step is done."""

    def note(self, text: str) -> None:  # noqa: B027  Not every log has a place for it.
        """Something else that a person may want to know."""

    def close(self) -> None:  # noqa: B027  Not every log has something to end.
        """The run is over."""


class Logs(RunLog):
    """Several logs as one."""

    def __init__(self, logs: Iterable[RunLog]) -> None:
        self._logs = list(logs)

    def step(self, report: StepReport) -> None:
        """Tell all."""
        for log in self._logs:
            log.step(report)

    def note(self, text: str) -> None:
        """Tell all."""
        for log in self._logs:
            log.note(text)

    def close(self) -> None:
        """Close all."""
        for log in self._logs:
            log.close()


class JsonLines(RunLog):
    """Writes one JSON object a step; rows behind step ``after`` are dropped first.

    Raises RunError where the file cannot be opened, WriteError where no row can be added.
    """

    def __init__(self, path: str | Path, *, after: int) -> None:
        path = Path(path)
        kept = _rows_until(path, after)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("wb")
        except OSError as error:
            raise RunError(f"the log {path} cannot be written: {error.strerror}") from None
        with self._writing():
            self._file.writelines(kept)
            self._file.flush()

    def step(self, report: StepReport) -> None:
        """Write a row; it is in the file when this returns."""
        with self._writing():
            self._file.write(msgspec.json.encode(report.as_dict()) + b"\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        with self._writing():
            self._file.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise WriteError(error.errno, error.strerror, self._file.name) from None


class _Row(msgspec.Struct):
    """What is read of a line: of which step it tells."""

    step: int = 0


def _rows_until(path: Path, last: int) -> list[bytes]:
    """The lines of steps up to ``last``; half a line, from a run that died, is none of them."""
    if not last or not path.is_file():
        return []
    kept = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            row = msgspec.json.decode(line, type=_Row)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
        if row.step <= last:
            kept.append(line)
    return kept


class TensorBoard(RunLog):
    """Writes scalars to a TensorBoard directory. Raises RunError where it is not installed."""

    def __init__(self, directory: str | Path) -> None:
        try:
            torch_side = import_module("torch.utils.tensorboard")
        except ImportError:
            raise RunError(
                "tensorboard= needs the package tensorboard, which is not installed; install it, "
                "or use log= for a file of JSON lines"
            ) from None
        self._writer: Any = torch_side.SummaryWriter(str(directory))

    def step(self, report: StepReport) -> None:
        """Write each number of a report under its name."""
        speed, noun = report.speed
        row = {"loss": report.loss, **report.numbers, **report.rates}
        row |= {"seconds": report.seconds, f"{noun} per second": speed}
        row |= {f"evaluation/{name}": value for name, value in (report.evaluation or {}).items()}
        for name, value in row.items():
            self._writer.add_scalar(name, value, report.step)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()
