"""The loop over the steps of a training run, with new workers after a loss.

The driver reads the data and the learning rates, sends each step on its way while the one before it
still runs, and takes losses as they come; where something is evaluated or saved it waits for all
that is under way. Under torchrun every rank runs this same code and is one slot.

Invariant: what a step computes follows from the program, the data's order and the seed
alone, not from when a run was interrupted; a run that fails leaves its last checkpoint whole.
"""

from __future__ import annotations

import math
import signal
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

import torch

from shardwright.errors import LaunchError, RunError, WorkerError
from shardwright.launch.torchrun import is_torchrun
from shardwright.runtime.memory import MEMORY
from shardwright.runtime.training_runner import TrainingRunner
from shardwright.tracing.rates import Rates
from shardwright.training.checkpoint import Position, Saver
from shardwright.training.data import Batch, Loading, rows_of
from shardwright.training.logs import (
    LOSS,
    JsonLines,
    Logs,
    RunLog,
    StepReport,
    TensorBoard,
    loss_of,
    measures,
)
from shardwright.training.options import TrainOptions
from shardwright.training.program import DRAWS, TrainingProgram, batch_size
from shardwright.training.programs import Bucket, Evaluation, StepBuckets, described_batch
from shardwright.training.result import TrainResult

PREFETCH_DEPTH = 2
"""How many steps may be on their way: while one runs, the inputs of the next are there."""
MANY_SHAPES = 8
"""With how many programs for shapes of batches a run says that they are many: a choice."""


@dataclass(frozen=True, slots=True)
class _StepUnderWay:
    """A step that is on its way: where the run stands after it, and what it used."""

    position: Position
    batch: Batch
    rates: dict[str, float]
    outcome: Future[Any]
    ended: list[float] = field(default_factory=list)
    """When it ended, as soon as that is noted; the run may ask for the outcome later."""

    def __post_init__(self) -> None:
        self.outcome.add_done_callback(lambda _: self.ended.append(time.monotonic()))


class TrainLoop:
    """One run, with as many sessions as it takes."""

    def __init__(
        self,
        *,
        options: TrainOptions,
        loading: Loading,
        program: TrainingProgram,
        buckets: StepBuckets,
        rates: Rates,
        evaluation: Evaluation | None,
        result: TrainResult,
        display: RunLog,
    ) -> None:
        self._options = options
        self._loading = loading
        self._first = program.batch
        self._program = program
        self._buckets = buckets
        self._rates = rates
        self._rates_before = deepcopy(rates.state_dict())
        self._evaluation = evaluation
        self._result = result
        self._saver: Saver | None = None
        if options.checkpoint is not None:
            self._saver = Saver(options.checkpoint, program, result.pipeline)
        self._is_rank_zero = options.is_rank_zero
        # torchrun's ranks get signals one by one, and would stop behind different steps.
        together = options.in_process or not is_torchrun()
        self._stopping = Stopping(wanted=together and options.checkpoint is not None)
        self._display = display
        self._logs = Logs([self._display])
        self._finished_at = 0.0
        self._warned_of_short = False
        self._warned_of_nan = False

    # --- sessions ---------------------------------------------------------------------------

    def run(self) -> TrainResult:
        """Train, from the beginning or from a checkpoint. Raises RunError and its kinds."""
        path = self._checkpoint_to_resume()
        restarts = self._options.restarts
        with closing(self._display):
            while not self._attempt(path, last=not restarts):
                restarts -= 1
                path = self._latest()
        if self._options.write_back:
            self._program.write_back(self._result.state)
        return self._result

    def _attempt(self, path: Path | None, *, last: bool) -> bool:
        """Train in one session; says whether it came to its end.

        Raises if it was the last, and what other workers would meet as well.
        """
        try:
            self._train_from(path)
        except (WorkerError, LaunchError) as error:
            if last or not (isinstance(error, LaunchError) or error.lost):
                raise
            self._display.note(f"{type(error).__name__}: {error}\nthe workers are replaced")
            return False
        return True

    def _train_from(self, path: Path | None) -> None:
        """Train in one session, from a checkpoint or from the beginning."""
        options = self._options
        if not options.in_process:
            count = len(self._result.pipeline.devices)
            self._display.note("joining the other ranks" if is_torchrun() else _starting(count))
        with TrainingRunner(
            self._result.pipeline,
            in_process=options.in_process,
            timeout=options.timeout,
            threads=options.threads,
            trace=options.trace is not None,
            modules=options.modules,
            in_flight=PREFETCH_DEPTH,
        ) as session:
            self._read_own_rows(session)
            position = self._begin_at(session, path)
            with closing(Logs(self._files(position.step))) as files:
                self._logs = Logs([files, self._display])
                with self._stopping:
                    self._train(session, position)
                if self._stopping.requested:
                    self._stopping.end()
            self._result.state = session.state()
            if options.trace is not None:
                timeline = session.timeline
                if self._is_rank_zero:
                    timeline.save_chrome_trace(options.trace)
        self._result.model = self._program.state_dict(self._result.state)

    def _read_own_rows(self, session: TrainingRunner) -> None:
        """Under torchrun read no more of the data than this rank's slot takes."""
        parts = {name: rows for name, rows in session.own_part().items() if name != DRAWS}
        if parts:
            self._loading.read_rows(rows_of(parts), batch_size(self._first.tensors))

    def _begin_at(self, session: TrainingRunner, path: Path | None) -> Position:
        """Bring the session, the rates and the reports to where a checkpoint stood."""
        position = Position()
        rates: Mapping[str, Any] = deepcopy(self._rates_before)
        if path is not None:
            assert self._saver is not None
            resumed = self._saver.load(session, path)
            position, rates = resumed.position, resumed.rates
            self._display.note(f"resumes from {path}")
        self._rates.load_state_dict(rates)
        self._result.steps = position.step
        self._result.reports = [r for r in self._result.reports if r.step <= position.step]
        return position

    def _checkpoint_to_resume(self) -> Path | None:
        latest = self._latest()
        damaged = self._saver.checkpoints.damaged() if self._saver is not None else []
        names = ", ".join(path.name for path in damaged)
        if latest is None and damaged:
            raise RunError(
                f"{self._options.checkpoint} has no checkpoint that can be read: {names} cannot; "
                "remove them to begin anew, or give another directory"
            )
        if damaged:
            self._display.note(f"{names} cannot be read, and is passed over")
        if latest is not None and not self._options.resume:
            raise RunError(
                f"{self._options.checkpoint} has checkpoints, the last of them {latest.name}; go "
                "on from it with resume=True, or give another directory"
            )
        return latest

    def _latest(self) -> Path | None:
        return self._saver.checkpoints.latest() if self._saver is not None else None

    # --- steps ------------------------------------------------------------------------------

    def _train(self, session: TrainingRunner, position: Position) -> None:
        under_way: deque[_StepUnderWay] = deque()
        self._finished_at = time.monotonic()
        for batch, last in self._marked(self._batches(position)):
            bucket = self._bucket(batch)
            position = self._after(position, batch, bucket.microbatches)
            while len(under_way) >= PREFETCH_DEPTH:
                self._report(self._finish(under_way.popleft()))
            under_way.append(self._begin(session, batch, bucket, position))
            # The step after a change of hyper-parameters is refused: this is the last one to save.
            last = last or self._rates.change() is not None
            if last or self._pauses_after(position.step):
                while len(under_way) > 1:
                    self._report(self._finish(under_way.popleft()))
                self._pause(session, under_way.popleft(), last=last)

    def _marked(self, batches: Iterator[Batch]) -> Iterator[tuple[Batch, bool]]:
        """Each batch, and whether it is the last; one is read ahead, until the run is stopped."""
        batch = next(batches, None)
        while batch is not None:
            try:
                following = None if self._stopping.requested else next(batches, None)
            except Exception:
                # Ctrl-C goes to the processes of a DataLoader as well, without which it fails.
                if not self._stopping.requested:
                    raise
                following = None
            yield batch, following is None
            batch = following

    def _batches(self, position: Position) -> Iterator[Batch]:
        """The batches of the steps that are left."""
        batches = self._loading.batches(position.epoch, position.batch)
        if self._options.drop_last:
            batches = filter(self._is_full, batches)
        if self._options.steps is None:
            return batches
        return islice(batches, max(0, self._options.steps - position.step))

    def _is_full(self, batch: Batch) -> bool:
        """Whether a batch has as many rows as the first one; the first that has fewer is noted."""
        full = batch_size(batch.tensors) >= batch_size(self._first.tensors)
        if not full and not self._warned_of_short:
            self._warned_of_short = True
            described = described_batch(batch, self._first)
            self._display.note(f"{described}; such batches are left out")
        return full

    def _bucket(self, batch: Batch) -> Bucket:
        """The program for a batch; where one is made for it, that is noted."""
        if not self._buckets.has(batch) and self._buckets.count == MANY_SHAPES:
            self._display.note(
                f"there are programs for {MANY_SHAPES} shapes, each with memory of its own: "
                "pad batches to a few lengths"
            )
        return self._buckets.of(batch)

    def _after(self, position: Position, batch: Batch, microbatches: int) -> Position:
        """Where the run stands when a batch is done."""
        draws = position.draws + microbatches
        return Position(position.step + 1, batch.epoch, batch.number + 1, draws)

    def _begin(
        self, session: TrainingRunner, batch: Batch, bucket: Bucket, position: Position
    ) -> _StepUnderWay:
        given = dict(batch.kwargs)
        if self._program.draws:
            given[DRAWS] = torch.arange(position.draws - bucket.microbatches, position.draws)
        rates = self._rates.values
        submit = session.submit
        if bucket is not self._buckets.first:
            submit = partial(session.submit_to, bucket.pipeline)
        future = submit(*batch.args, **given, **self._rates.inputs())
        self._rates.advance()
        return _StepUnderWay(position, batch, rates, future)

    def _finish(self, step: _StepUnderWay) -> StepReport | None:
        """Wait for a step; what to report of it, on the rank that reports."""
        outcome = step.outcome.result()
        now = step.ended[0] if step.ended else time.monotonic()
        seconds, self._finished_at = now - self._finished_at, now
        self._result.steps = step.position.step
        if not self._is_rank_zero:
            return None
        numbers = measures(outcome, LOSS)
        loss = loss_of(numbers)
        self._warn_of_nan(step.position.step, loss)
        return StepReport(
            step=step.position.step,
            epoch=step.batch.epoch,
            loss=loss,
            numbers=numbers,
            rates=step.rates,
            seconds=seconds,
            samples=step.batch.size,
            tokens=step.batch.tokens,
        )

    def _warn_of_nan(self, step: int, loss: float) -> None:
        """Warn of the first loss that is no number: the steps behind it train on it."""
        if self._warned_of_nan or math.isfinite(loss):
            return
        self._warned_of_nan = True
        kept = self._latest()
        warnings.warn(
            f"the loss of step {step} is {loss}, and what is trained from here on is likely to be "
            f"lost; {'the last checkpoint is ' + kept.name if kept is not None else 'stop'}, lower "
            "the learning rate, or clip gradients (nn.utils.clip_grad_norm_) in the step",
            RuntimeWarning,
            stacklevel=2,
        )

    def _pauses_after(self, step: int) -> bool:
        """Whether something is done after a step that needs all steps before it to be over."""
        return step == 1 or self._is_due(step, self._options.eval_every) or self._saves_after(step)

    def _saves_after(self, step: int) -> bool:
        return self._is_due(step, self._options.checkpoint_every)

    def _is_due(self, step: int, every: int | None) -> bool:
        return every is not None and step % every == 0

    def _pause(self, session: TrainingRunner, step: _StepUnderWay, *, last: bool) -> None:
        """Finish a step with nothing behind it; evaluate and save where that is due.

        What is reported of a step is on the disk before the checkpoint that stands behind it.
        """
        report, number = self._finish(step), step.position.step
        found: dict[str, Any] = {}
        if self._evaluation is not None and (
            (last and not self._stopping.requested)
            or self._is_due(number, self._options.eval_every)
        ):
            found["evaluation"] = self._evaluation.run(session, is_rank_zero=self._is_rank_zero)
        if number == 1 and not self._options.in_process:
            found["memory"] = session.call_workers(MEMORY)
        self._report(replace(report, **found) if report is not None else None)
        if self._saver is not None and (last or self._saves_after(number)):
            state = self._rates.state_dict()
            self._saver.save(session, step.position, state, is_rank_zero=self._is_rank_zero)
        self._finished_at = time.monotonic()

    # --- reports ----------------------------------------------------------------------------

    def _report(self, report: StepReport | None) -> None:
        if report is not None:
            self._result.reports.append(report)
            self._logs.step(report)

    def _files(self, step: int) -> Iterator[RunLog]:
        """The logs that are kept, to be gone on with behind a step."""
        if self._options.log is not None and self._is_rank_zero:
            yield JsonLines(self._options.log, after=step)
        if self._options.tensorboard is not None and self._is_rank_zero:
            yield TensorBoard(self._options.tensorboard)


def _starting(count: int) -> str:
    return f"starting {count} workers" if count > 1 else "starting a worker"


# --- stopping -------------------------------------------------------------------------------------
#
# A second one ends the process as it always does.


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopping:
    """Takes the signals while it is entered; a context manager.

    It leaves them alone if not ``wanted``, where the program has handlers of its own or ignores
    them, and in threads that are not the main one, which gets no signals.
    """

    def __init__(self, *, wanted: bool) -> None:
        self._wanted = wanted
        self._signal: int | None = None
        self._before: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self._signal is not None

    def end(self) -> NoReturn:
        """Raise KeyboardInterrupt, or SystemExit for SIGTERM."""
        assert self._signal is not None, "a signal has come"
        if self._signal == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + self._signal)

    def __enter__(self) -> Self:
        if self._wanted and threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._signal is None:
            self._signal = number
            return
        signal.signal(number, self._before[number])
        signal.raise_signal(number)
