"""``shardwright train``: a user's training program, run on a mesh.

The options are those of `train`. What is being done goes to the error stream; at the end one table
says how the run went. Under torchrun every rank runs this and is one device slot; rank 0 prints.
"""

from __future__ import annotations

import os
import signal
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from shardwright.cli.options import (
    PlanFile,
    PlanOptions,
    SlotKind,
    TraceFile,
    WorkerOptions,
    as_arguments,
    writable,
)
from shardwright.errors import InputError

if TYPE_CHECKING:
    from shardwright.training import TrainResult

Target = Annotated[
    str,
    typer.Argument(
        metavar="FILE.py:FUNCTION",
        help="A function that returns (step_fn, data), or a dict or object with step_fn, data, "
        "evaluate, eval_data and scheduler.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainCommandOptions:
    """Arguments of `train` beside how the step is split and run."""

    steps: Annotated[int | None, typer.Option(min=1, help="Number of steps.")] = None
    epochs: Annotated[int | None, typer.Option(min=1, help="Number of passes over the data.")] = (
        None
    )
    device_kind: SlotKind = "cpu"
    lower: Annotated[
        bool, typer.Option("--lower", help="Run kernel calls instead of operators.")
    ] = False
    checkpoint: Annotated[Path | None, typer.Option(help="Directory for checkpoints.")] = None
    checkpoint_every: Annotated[
        int | None, typer.Option(min=1, help="Steps between checkpoints; one more at the end.")
    ] = None
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume from the latest checkpoint, if there is one.")
    ] = False
    restarts: Annotated[int, typer.Option(min=0, help="How often to replace lost workers.")] = 0
    eval_every: Annotated[
        int | None, typer.Option(min=1, help="Steps between evaluations; one more at the end.")
    ] = None
    log: Annotated[
        Path | None,
        # torchrun takes --log for an abbreviation of options of its own.
        typer.Option("--log", "--log-file", help="Write one JSON object per step to this file."),
    ] = None
    tensorboard: Annotated[
        Path | None, typer.Option(help="Write scalars for TensorBoard to this directory.")
    ] = None
    trace: TraceFile = None
    seed: Annotated[int, typer.Option(help="Seed of data order and dropout.")] = 0
    drop_last: Annotated[
        bool, typer.Option("--drop-last", help="Skip batches with fewer rows than the first.")
    ] = False
    quiet: Annotated[bool, typer.Option("--quiet", help="Show only the summary.")] = False


def train(
    target: Target,
    split: PlanOptions,
    options: TrainCommandOptions,
    workers: WorkerOptions,
    plan: PlanFile = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", callback=writable, help="Write the trained model as safetensors."
        ),
    ] = None,
) -> None:
    """Train with a step written for one device, on local processes or as a rank of torchrun."""
    if options.epochs is None and options.steps is None:
        raise InputError("say how long to train: --epochs or --steps")
    kept = options.resume or options.restarts or options.checkpoint_every
    if options.checkpoint is None and kept:
        raise InputError("--resume, --restarts and --checkpoint-every need --checkpoint DIRECTORY")

    from shardwright.cli.userfiles import UserFiles
    from shardwright.pipeline import write_paramfile
    from shardwright.planning import Plan
    from shardwright.training import train as run_training

    files = UserFiles()
    arguments = split.arguments(files.policy)
    program = files.training(target)
    with _told_of_stop(options.checkpoint):
        result = run_training(
            **program._asdict(),
            **arguments,
            **as_arguments(options),
            **workers.arguments(),
            plan=Plan.load(plan) if plan is not None else None,
            write_back=False,
        )
    if workers.in_process or os.environ.get("RANK", "0") == "0":
        if output is not None:
            write_paramfile(output, result.state_dict())
        Console().print(summary(result))


@contextmanager
def _told_of_stop(checkpoint: Path | None) -> Iterator[None]:
    """One line, and the status that a shell expects, where Ctrl-C or SIGTERM ends a run."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as stop:
        code = stop.code if isinstance(stop, SystemExit) else 128 + signal.SIGINT
        if os.environ.get("RANK", "0") == "0":
            Console(stderr=True).print(f"stopped; {_kept(checkpoint)}", soft_wrap=True)
        raise typer.Exit(int(code or 0)) from None


def _kept(checkpoint: Path | None) -> str:
    """What is left of a run that was stopped."""
    from shardwright.training.checkpoint import Checkpoints

    if checkpoint is None:
        return "nothing is kept without --checkpoint DIRECTORY"
    latest = Checkpoints(checkpoint).latest()
    return f"--resume goes on from {latest}" if latest else "there was no step to keep yet"


def summary(result: TrainResult) -> Table:
    """How a run went: its steps, losses, times and last evaluation."""
    from shardwright.ir.tensor_meta import seconds_text
    from shardwright.reporting import new_table

    table = new_table("Training", ("", ""))
    table.show_header = False
    table.add_row("steps", str(result.steps))
    if result.reports:
        table.add_row("loss", f"{result.losses[0]:.6g} to {result.losses[-1]:.6g}")
        table.add_row("a step takes", seconds_text(statistics.median(result.seconds)))
    for name, number in next(reversed(list(result.evaluations.values())), {}).items():
        table.add_row(f"evaluation, {name}", f"{number:.6g}")
    return table
