"""What `train` is told beside the program, its data and its mesh."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from shardwright.atomic import check_writable
from shardwright.errors import InputError
from shardwright.launch.torchrun import is_torchrun
from shardwright.training.data import Data
from shardwright.training.logs import Display, Logs, RunLog


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
    def is_rank_zero(self) -> bool:
        """Whether this process reports: torchrun's rank 0, or the caller of `train`."""
        return self.in_process or os.environ.get("RANK", "0") == "0"

    def make_display(self) -> RunLog:
        """What shows how the run goes, from before its first step on; nothing if ``quiet``."""
        if self.quiet or not self.is_rank_zero:
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
        if self.trace is not None and self.is_rank_zero:
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
