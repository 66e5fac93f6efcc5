"""``shardwright profile``: what each layer of a user's program takes on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from shardwright.cli.options import Target, writable
from shardwright.cli.splitting import Microbatches, graph_of
from shardwright.errors import PlanError, ProfileError


def profile(
    target: Target,
    depth: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="How far down the tree of modules: 0 is the whole program, 1 the modules that it "
            "consists of; every operator by itself if not given.",
        ),
    ] = None,
    basic_blocks: Annotated[
        list[str] | None,
        typer.Option("--basic-block", help="A class of modules to measure whole; may be repeated."),
    ] = None,
    samples: Annotated[
        int, typer.Option("--n-iter", min=1, help="Of how many samples times are medians.")
    ] = 10,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Let the backward run the forward again.")
    ] = False,
    microbatches: Microbatches = None,
    device: Annotated[str, typer.Option(help="Where to measure: cpu, cuda, cuda:1.")] = "cpu",
    threads: Annotated[int, typer.Option(min=1, help="With how many threads.")] = 1,
    cache: Annotated[
        Path | None, typer.Option(help="Keep measurements here, not in the user's cache directory.")
    ] = None,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Measure everything again, and keep nothing.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", callback=writable, help="Write the profile, as JSON."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(callback=writable, help="Draw a bar chart to this .svg, .png or .pdf."),
    ] = None,
) -> None:
    """Measure each layer of a model, or of a training step's forward, and print a table."""
    if no_cache and cache is not None:
        raise ProfileError("--cache keeps what --no-cache does not; leave one of them out")

    from shardwright.cli.steps import Steps
    from shardwright.cli.userfiles import UserFiles
    from shardwright.costs.profile_chart import chart_format
    from shardwright.profiling import profile as profile_graph

    if plot is not None:
        chart_format(plot)
    steps, files = Steps(Console(stderr=True)), UserFiles()
    with steps.step("make the program"):
        program = files.either(target)
    with steps.step("capture"):
        graph = graph_of(program, microbatches or 1)
    with steps.step("measure"):
        found = profile_graph(
            graph,
            depth=depth,
            basic_blocks=tuple(basic_blocks or ()),
            n_iter=samples,
            recompute=recompute,
            device=device,
            threads=threads,
            cache=False if no_cache else cache or True,
        )
    typer.echo(str(found))
    if output is not None:
        found.save(output)
    if plot is not None:
        found.plot(plot)


# --- shardwright cluster --------------------------------------------------------------------------


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
