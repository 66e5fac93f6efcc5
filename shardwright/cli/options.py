"""Arguments and options that several commands have.

Those that say how a graph is split stand in `shardwright.cli.splitting`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from shardwright.atomic import check_writable
from shardwright.errors import InputError


def writable(path: Path | None) -> Path | None:
    """The path of a file to write, known to be writable before any work is done for it.

    Of torchrun's ranks the first writes, maybe on another host. Raises InputError.
    """
    if path is not None and os.environ.get("RANK", "0") == "0":
        try:
            check_writable(path)
        except OSError as error:
            raise InputError(
                f"{path} cannot be written: {error.strerror}; give the path of a file in a "
                "directory that there is"
            ) from None
    return path


Target = Annotated[
    str,
    typer.Argument(
        metavar="FILE.py:FUNCTION",
        help="A function that returns (model, args, kwargs), or (step_fn, data) of a training "
        "step.",
    ),
]
PipelineFile = Annotated[Path, typer.Argument(metavar="FILE", help="A pipeline file.")]
PipelineOutput = Annotated[
    Path,
    typer.Option("--output", "-o", callback=writable, help="The pipeline file to write."),
]
Modules = Annotated[
    list[str] | None,
    typer.Option("--import", help="A module that registers operators; may be repeated."),
]
# What a file may say of a device, told without importing it; a test holds them equal.
DeviceKind = Literal["cpu", "npu", "cuda"]
SlotKind = Annotated[DeviceKind, typer.Option("--device-kind", help="What every slot is.")]
InProcess = Annotated[bool, typer.Option("--in-process", help="Run all slots in this process.")]
NpuAsCpu = Annotated[bool, typer.Option("--npu-as-cpu", help="Run npu slots on the CPU.")]
TraceFile = Annotated[
    Path | None,
    typer.Option("--trace", callback=writable, help="Write the timeline as a Chrome trace."),
]
DrawsTimeline = Annotated[bool, typer.Option("--timeline", help="Draw the timeline.")]

Seconds = Annotated[float, typer.Option(help="Seconds that one operation may wait.")]

Threads = Annotated[int, typer.Option(min=1, help="How many threads each worker computes with.")]

WeightsFolder = Annotated[
    Path | None,
    typer.Option(
        "--weights",
        exists=True,
        file_okay=False,
        help="A folder, beside the file's own, in which its parameter files may lie.",
    ),
]
