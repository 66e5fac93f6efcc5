"""What a run reports, and the files that keep it: JSON lines, TensorBoard.

Input: a `StepReport` after each step. Invariant: a log of JSON lines has one object a
step, in order, each step once: a resumed run continues after the step that it resumes from.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text
from torch import Tensor

from shardwright.errors import InputError, RunError, WriteError
from shardwright.ir.structure import describe_result, leaves
from shardwright.ir.tensor_meta import format_bytes


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


# --- display --------------------------------------------------------------------------------------
#
# In a terminal the last steps stand in a table that is drawn anew a few times a second; notes
# scroll above it. Without a terminal a step is one line, at most one each ``interval`` seconds
# beside the first, the last and those with an evaluation.


_ROWS = 10


class Display(RunLog):
    """Shows a run on a console; ``steps`` is how many it will have, None where nobody knows."""

    def __init__(
        self, console: Console, *, steps: int | None = None, interval: float = 1.0
    ) -> None:
        self._console = console
        self._steps = steps
        self._interval = interval
        self._rows: deque[StepReport] = deque(maxlen=_ROWS)
        self._evaluation: StepReport | None = None
        self._memory: dict[str, int] = {}
        self._shown: StepReport | None = None
        self._since = -interval
        self._live: Live | None = None

    def step(self, report: StepReport) -> None:
        """Show a step."""
        self._rows.append(report)
        self._memory = report.memory or self._memory
        if report.evaluation is not None:
            self._evaluation = report
        if not self._console.is_terminal:
            self._line(report)
            return
        if self._live is None:
            self._live = Live(
                console=self._console, refresh_per_second=4, get_renderable=self._draw
            )
            self._live.start()

    def note(self, text: str) -> None:
        """Show a line of text."""
        self._console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the table as it is, or show the last line."""
        if self._live is not None:
            self._live.stop()
        elif self._rows and self._rows[-1] is not self._shown:
            self._print(self._rows[-1])

    def _line(self, report: StepReport) -> None:
        due = time.monotonic() - self._since >= self._interval
        if due or report.evaluation is not None:
            self._print(report)

    def _print(self, report: StepReport) -> None:
        self._shown, self._since = report, time.monotonic()
        cells = zip(_headings(report), _cells(report, self._steps), strict=True)
        words = [f"{heading} {cell}" for heading, cell in cells]
        words += [f"evaluation {_numbers(report.evaluation)}"] if report.evaluation else []
        self._console.print("  ".join(words), markup=False, highlight=False, soft_wrap=True)

    def _draw(self) -> RenderableType:
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
        for heading in _headings(self._rows[-1]):
            table.add_column(heading, justify="right", no_wrap=True)
        for report in self._rows:
            table.add_row(*_cells(report, self._steps))
        below = []
        if self._evaluation is not None and self._evaluation.evaluation is not None:
            numbers = _numbers(self._evaluation.evaluation)
            below.append(Text(f"evaluation after step {self._evaluation.step}: {numbers}"))
        if self._memory:
            slots = ", ".join(f"{slot} {format_bytes(n)}" for slot, n in self._memory.items())
            below.append(Text(f"memory: {slots}", style="dim"))
        return Group(table, *below)


def _headings(report: StepReport) -> list[str]:
    others = [name for name in report.numbers if name != "loss"]
    return ["step", "epoch", "loss", *others, *report.rates, "time", f"{report.speed[1]}/s"]


def _cells(report: StepReport, steps: int | None) -> list[str]:
    step = str(report.step) if steps is None else f"{report.step}/{steps}"
    others = [f"{value:.4g}" for name, value in report.numbers.items() if name != "loss"]
    rates = [f"{rate:.3g}" for rate in report.rates.values()]
    seconds = f"{report.seconds * 1e3:.3g} ms" if report.seconds < 1 else f"{report.seconds:.3g} s"
    speed = f"{report.speed[0]:,.0f}"
    return [step, str(report.epoch), f"{report.loss:.6g}", *others, *rates, seconds, speed]


def _numbers(evaluation: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.6g}" for name, value in evaluation.items())


# --- numbers of a result --------------------------------------------------------------------------


LOSS = "loss"


def measures(result: Any, alone: str) -> dict[str, float]:
    """The numbers of a result: its tensors of one element."""
    named = _named(result, alone)
    return {name: tensor.item() for name, tensor in named.items() if tensor.numel() == 1}


def means(result: Any, alone: str) -> dict[str, float]:
    """The mean of each tensor of a result. Raises InputError where there is none."""
    named = _named(result, alone)
    if not named:
        raise InputError(f"{alone} returns no tensor; return what it measures")
    return {name: tensor.double().mean().item() for name, tensor in named.items()}


def _named(result: Any, alone: str) -> dict[str, Tensor]:
    """The tensors of a result by name; ``alone`` is that of one which is all of it."""
    if isinstance(result, Tensor):
        return {alone: result}
    tree, tensors = describe_result(result)
    return {leaf.name: tensors[leaf.index] for leaf in leaves(tree)}


def loss_of(found: dict[str, float]) -> float:
    """The loss among a step's numbers: the one of that name, else the first. Raises InputError."""
    if not found:
        raise InputError("the step returns no number to show as its loss; return the loss")
    return found[LOSS] if LOSS in found else next(iter(found.values()))
