"""Arguments and options that several commands have.

Those that say how a graph is split stand in `shardwright.cli.splitting`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwright.pipeline.schema import DeviceKind

Target = Annotated[
    str,
    typer.Argument(
        metavar="FILE.py:FUNCTION",
        help="A function that returns (model, args, kwargs), or (step_fn, data) of a training "
        "step.",
    ),
]
PipelineFile = Annotated[Path, typer.Argument(metavar="FILE", help="A pipeline file.")]
PipelineOutput = Annotated[Path, typer.Option("--output", "-o", help="The pipeline file to write.")]
Modules = Annotated[
    list[str] | None,
    typer.Option("--import", help="A module that registers operators; may be repeated."),
]
SlotKind = Annotated[DeviceKind, typer.Option("--device-kind", help="What every slot is.")]
InProcess = Annotated[bool, typer.Option("--in-process", help="Run all slots in this process.")]
TraceFile = Annotated[
    Path | None, typer.Option("--trace", help="Write the timeline as a Chrome trace.")
]
DrawsTimeline = Annotated[bool, typer.Option("--timeline", help="Draw the timeline.")]
