"""``shardwright cluster``: what the machine at hand is, as a cluster file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from shardwright.cli.steps import Steps
from shardwright.errors import PlanError
from shardwright.layout import Cluster
from shardwright.profiling import profile_cluster


def cluster(
    file: Annotated[
        Path | None,
        typer.Argument(help="A cluster file to check and print; this machine if not given."),
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(min=1, help="How many slots; one a core, or a GPU, by default."),
    ] = None,
    device: Annotated[str, typer.Option(help="What each slot is: cpu or cuda.")] = "cpu",
    threads: Annotated[int, typer.Option(min=1, help="Threads of each slot of a CPU.")] = 1,
    samples: Annotated[
        int, typer.Option("--n-iter", min=1, help="Of how many samples times are medians.")
    ] = 10,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the cluster file here.")
    ] = None,
) -> None:
    """Measure this machine (rates, memory, links) and print it as a cluster file."""
    if file is not None and devices is not None:
        raise PlanError("give either a cluster file or --devices, to measure so many")
    if file is not None:
        found = Cluster.load(file)
    else:
        with Steps(Console(stderr=True)).step("measure"):
            found = profile_cluster(devices, device=device, threads=threads, n_iter=samples)
    if output is None:
        typer.echo(found.to_yaml(), nl=False)
    else:
        found.save(output)
