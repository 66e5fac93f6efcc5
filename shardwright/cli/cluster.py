"""``shardwright cluster``: what the machine at hand is, as a cluster file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from shardwright.cli.options import writable
from shardwright.errors import PlanError


def cluster(
    file: Annotated[
        Path | None,
        typer.Argument(help="A cluster file to check and print; this machine if not given."),
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(min=1, help="How many slots; one a core, or a GPU, by default."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="What each slot is: cpu or cuda; cpu by default.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of each slot of a CPU; 1 by default.")
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            "--n-iter", min=1, help="Times are medians of so many samples, 10 by default."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", callback=writable, help="Write the cluster file here."),
    ] = None,
) -> None:
    """Measure this machine (rates, memory, links) and print it as a cluster file."""
    asked = {"--devices": devices, "--device": device, "--threads": threads, "--n-iter": samples}
    given = [name for name, value in asked.items() if value is not None]
    if file is not None and given:
        raise PlanError(
            f"give either a cluster file or {', '.join(given)}, to measure this machine by"
        )

    from shardwright.cli.steps import Steps
    from shardwright.clusters import Cluster
    from shardwright.profiling import profile_cluster

    if file is not None:
        found = Cluster.load(file)
    else:
        with Steps(Console(stderr=True)).step("measure"):
            found = profile_cluster(
                devices, device=device or "cpu", threads=threads or 1, n_iter=samples or 10
            )
    if output is None:
        typer.echo(found.to_yaml(), nl=False)
    else:
        found.save(output)
