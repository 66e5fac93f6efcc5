"""What `train` is told beside the program, its data and its mesh."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from shardwright.atomic import check_writable
from shardwright.errors import InputError
from shardwright.ir.tensor_meta import format_bytes
from shardwright.launch.torchrun import is_torchrun
from shardwright.training.loading import Data
from shardwright.training.logs import Logs, RunLog, StepReport


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """How long a run is, what it keeps and shows, and how it is carried out; see `train`."""

    epochs: int | None
    steps: int | None
    eval_every: int | None
    checkpoint: str | Path | None
    checkpoint_every: int | None
    resume: bool
    restarts: int
    log: str | Path | None
    tensorboard: str | Path | None
    trace: str | Path | None
    quiet: bool
    in_process: bool
    timeout: float
    threads: int
    modules: Sequence[str]
    drop_last: bool
    write_back: bool
    seed: int

    @property
    def leads(self) -> bool:
        """Whether this process tells how the run goes: torchrun's rank 0, or who calls `train`."""
        return self.in_process or os.environ.get("RANK", "0") == "0"

    def make_display(self) -> RunLog:
        """What shows how the run goes, from before its first step on; nothing if ``quiet``."""
        if self.quiet or not self.leads:
            return Logs([])
        return Display(Console(stderr=True), steps=self.steps)

    def check(self, data: Data, *, evaluate: bool, eval_data: bool) -> None:
        """Raise InputError for what contradicts itself; which of the last two there are."""
        if self.epochs is None and self.steps is None:
            raise InputError("say how long to train: epochs= or steps=")
        for name in ("epochs", "steps", "checkpoint_every", "eval_every"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise InputError(f"{name} must be a number from 1 up, found {value!r}")
        if self.checkpoint is None and (self.resume or self.restarts or self.checkpoint_every):
            raise InputError("resume=, restarts= and checkpoint_every= need checkpoint=DIRECTORY")
        if evaluate != eval_data or (self.eval_every is not None and not evaluate):
            raise InputError("an evaluation needs both evaluate= and eval_data=")
        if self.restarts:
            self._check_restarts(data)
        if self.trace is not None and self.leads:
            self._check_trace(Path(self.trace))

    def _check_trace(self, path: Path) -> None:
        """Whether it can be written, which it is when all is done."""
        try:
            check_writable(path)
        except OSError as error:
            raise InputError(
                f"trace= cannot be written to {path}: {error.strerror}; give the path of a file "
                "in a directory that there is"
            ) from None

    def _check_restarts(self, data: Data) -> None:
        if is_torchrun() and not self.in_process:
            raise InputError(
                "restarts= is for workers that train starts; under torchrun give --max-restarts "
                "to torchrun, and resume=True"
            )
        if isinstance(data, Iterator):
            raise InputError(
                "restarts= reads the data again, which an iterator cannot give; give a list, a "
                "DataLoader, or a function that takes the number of the pass"
            )


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
