"""``shardwright simulate``: how long a pipeline file will take, and what it will hold."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from shardwright.cli.options import DrawsTimeline, Modules, PipelineFile, TraceFile, writable
from shardwright.cli.splitting import ClusterFile
from shardwright.errors import ProfileError

if TYPE_CHECKING:
    from shardwright.costs import Costs, TaskTimes
    from shardwright.simulation.simulated import StepSimulation


def simulate(
    file: PipelineFile,
    cluster: ClusterFile = None,
    calls: Annotated[
        int, typer.Option(min=1, help="How many steps or calls follow one another.")
    ] = 1,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Measure the supertasks on this machine; else estimate by shapes."
        ),
    ] = False,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Of each worker that measures.", show_default="1"),
    ] = None,
    times: Annotated[
        Path | None, typer.Option(help="Take the times that --save-times wrote.")
    ] = None,
    save_times: Annotated[
        Path | None,
        typer.Option(callback=writable, help="Write the times that --measure finds, as JSON."),
    ] = None,
    modules: Modules = None,
    trace: TraceFile = None,
    timeline: DrawsTimeline = False,
) -> None:
    """Simulate a pipeline file: its time, who waits for whom, and what each slot holds."""
    _check_together(measure, times, save_times, threads)

    from shardwright.cli.steps import Steps
    from shardwright.clusters import Cluster
    from shardwright.costs import Analytic, TaskTimes
    from shardwright.engine.agenda import is_training
    from shardwright.pipeline import Pipeline
    from shardwright.runtime import profile_tasks
    from shardwright.simulation.simulate import simulate as simulate_pipeline

    steps = Steps(Console(stderr=True))
    with steps.step("load"):
        pipeline = Pipeline.load(file)
        machines = Cluster.load(cluster) if cluster else Cluster((tuple(pipeline.devices),))
    costs: Costs | TaskTimes = Analytic(machines.device)
    if measure:
        with steps.step("measure"):
            costs = profile_tasks(file, threads or 1, modules=tuple(modules or ()))
        if save_times is not None:
            costs.save(save_times)
    elif times is not None:
        costs = TaskTimes.load(times)
    with steps.step("simulate"):
        found = simulate_pipeline(pipeline, costs, machines, calls=calls)
    if trace is not None:
        found.save_chrome_trace(trace)
    _report(found, "step" if is_training(pipeline) else "call", timeline=timeline)


def _check_together(
    measure: bool, times: Path | None, save_times: Path | None, threads: int | None
) -> None:
    """Raise ProfileError where options say two things about where times come from."""
    if measure and times is not None:
        raise ProfileError("--times takes the place of --measure; leave one of them out")
    if save_times is not None and not measure:
        raise ProfileError("--save-times writes what --measure finds; give that too")
    if threads is not None and not measure:
        raise ProfileError("--threads are those that measure; give --measure too, or leave it out")


def _report(found: StepSimulation, noun: str, *, timeline: bool) -> None:
    from shardwright.ir.tensor_meta import seconds_text
    from shardwright.reporting import TimelineChart, simulated_memory_table, simulation_table

    console = Console()
    text = f"a {noun} takes {seconds_text(found.step_time)}"
    if found.calls > 1:
        text += f", {found.calls} of them {seconds_text(found.seconds)}"
    console.print(text, highlight=False)
    if timeline:
        console.print("", TimelineChart(found.events), "", sep="\n")
    console.print(simulation_table(found), "", simulated_memory_table(found), sep="\n")
