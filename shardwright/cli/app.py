"""``shardwright``: the steps of the package as commands.

A result goes to standard output, what is being done to the error stream. A `ShardwrightError`, or
a file that cannot be read or written, ends a command with one line and exit status 1; ``--debug``
before the command shows the traceback instead.

A command imports what it needs when it runs: ``--help``, and what is wrong with options, come
without torch, which takes longer to import than many a command takes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from shardwright.atomic import replacing
from shardwright.cli.codegen import codegen as codegen_command
from shardwright.cli.draw import draw as draw_command
from shardwright.cli.lower import lower as lower_command
from shardwright.cli.options import (
    DrawsTimeline,
    InProcess,
    Modules,
    NpuAsCpu,
    PipelineFile,
    PipelineOutput,
    Seconds,
    SlotKind,
    Target,
    Threads,
    TraceFile,
    WeightsFolder,
    writable,
)
from shardwright.cli.plan import plan as plan_command
from shardwright.cli.profile import cluster as cluster_command
from shardwright.cli.profile import profile as profile_command
from shardwright.cli.simulate import simulate as simulate_command
from shardwright.cli.splitting import (
    Chunks,
    ClusterFile,
    Devices,
    Memory,
    MeshText,
    Microbatches,
    PlanFile,
    PolicyName,
    ProfileFile,
    Recompute,
    ScheduleName,
    Told,
    Zero,
    planned,
)
from shardwright.cli.train import train
from shardwright.errors import InputError, ShardwrightError
from shardwright.version import __version__

if TYPE_CHECKING:
    from shardwright.pipeline import Pipeline


class Commands(TyperGroup):
    """Turns the errors of this package, and of files, into one line."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; exit with status 1 where it fails."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # the reader of a pipe has enough; typer ends the command quietly
        except (ShardwrightError, OSError) as error:
            if ctx.params["debug"]:
                raise
            parts = (f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ()))
            Console(stderr=True).print(
                ", ".join(parts), style="red", markup=False, highlight=False, soft_wrap=True
            )
            raise typer.Exit(1) from None


app = typer.Typer(cls=Commands, no_args_is_help=True, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shardwright {__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    """Turn a PyTorch program for one device into a checked pipeline file for many, and run it."""


@app.command()
def build(
    target: Target,
    output: PipelineOutput,
    devices: Devices = None,
    cluster: ClusterFile = None,
    weights: Annotated[
        Path | None,
        typer.Option(
            help="The safetensors file, sharded index, or folder of either, with the weights."
        ),
    ] = None,
    policy: PolicyName = None,
    mesh: MeshText = None,
    profile: ProfileFile = None,
    plan: PlanFile = None,
    microbatches: Microbatches = None,
    schedule: ScheduleName = None,
    chunks: Chunks = None,
    recompute: Recompute = None,
    memory: Memory = None,
    zero: Zero = None,
    device_kind: SlotKind = "cpu",
    plain: Annotated[
        bool, typer.Option("--plain", help="Write no optional keys: the specification's format.")
    ] = False,
) -> None:
    """Capture a model or a training step, split it, and write a pipeline file."""
    from shardwright.building import build as build_pipeline
    from shardwright.cli.steps import Steps
    from shardwright.cli.userfiles import UserFiles
    from shardwright.reporting import device_table, headline

    steps, files = Steps(Console(stderr=True)), UserFiles()
    told = Told(
        devices=devices,
        cluster=cluster,
        policy=policy,
        mesh=mesh,
        profile=profile,
        plan=plan,
        microbatches=microbatches,
        schedule=schedule,
        chunks=chunks,
        recompute=recompute,
        memory=memory,
        zero=zero,
    )
    with steps.step("make the program"):
        program = files.either(target)
    graph, chosen = planned(program, files, told, steps)
    with steps.step("build"):
        pipeline = build_pipeline(graph, chosen, weights, device_kind=device_kind)
    with steps.step("save"):
        pipeline.save(output, plain=plain)
    Console().print(headline(pipeline), device_table(pipeline), sep="\n")


app.command("lower")(lower_command)
app.command("codegen")(codegen_command)
app.command("profile")(profile_command)
app.command("cluster")(cluster_command)
app.command("draw")(draw_command)
app.command()(plan_command)


@app.command()
def check(
    file: PipelineFile,
    weights: Annotated[
        bool, typer.Option("--weights", help="Open the parameter files too.")
    ] = False,
) -> None:
    """Check a pipeline file against every rule of the format."""
    from shardwright.cli.steps import Steps
    from shardwright.pipeline import Pipeline
    from shardwright.reporting import headline

    with Steps(Console(stderr=True)).step("check"):
        pipeline = Pipeline.load(file)
        if weights:
            pipeline.weights.check(pipeline.tensors)
    Console().print("right:", headline(pipeline))


@app.command()
def show(
    file: PipelineFile,
    task: Annotated[str | None, typer.Option(help="Print this supertask's graph instead.")] = None,
    schedule: Annotated[
        bool, typer.Option("--schedule", help="Print the schedule of a training step instead.")
    ] = False,
    memory: Annotated[
        bool, typer.Option("--memory", help="With --task, where a lowered graph's values lie.")
    ] = False,
) -> None:
    """Show what a pipeline file holds: device slots, supertasks, bytes, communication."""
    from shardwright.engine.compiling import task_plan
    from shardwright.pipeline import Pipeline
    from shardwright.reporting import overview

    if schedule and (task is not None or memory):
        raise InputError("--schedule shows the whole file; leave --task and --memory out")
    if memory and task is None:
        raise InputError("--memory shows one supertask's; name a lowered one with --task")
    pipeline = Pipeline.load(file)
    if schedule:
        typer.echo(schedule_text(pipeline, Console().width))
    elif task is None:
        Console().print(overview(pipeline))
    else:
        typer.echo(task_plan(pipeline, task) if memory else graph_text(pipeline, task))


def schedule_text(pipeline: Pipeline, width: int) -> str:
    """The table of a training pipeline's schedule. Raises ScheduleError where it has none."""
    from shardwright.pipeline import Training
    from shardwright.pipeline.check_schedule import schedule_of
    from shardwright.schedules import format_schedule

    training = pipeline.training or Training()
    schedule = schedule_of(training)
    slots = training.schedule.slots if training.schedule else ()
    return format_schedule(schedule, width=width, labels=[" ".join(names) for names in slots])


def graph_text(pipeline: Pipeline, task: str) -> str:
    """The graph of a compute supertask, one node or kernel call a line. Raises InputError."""
    from shardwright.kernels.files import decode as decode_lowered
    from shardwright.pipeline.fxtext import decode
    from shardwright.pipeline.rules import COMPUTE_KINDS

    tasks = pipeline.supertasks
    computing = [name for name, known in tasks.items() if known.kind in COMPUTE_KINDS]
    if task not in computing:
        raise InputError(f"{task!r} has no graph; supertasks that have: {', '.join(computing)}")
    if tasks[task].kind == "dfg":
        return str(decode_lowered(pipeline.data_of(task), name=task))
    tensors = [pipeline.tensors[name] for name in pipeline.supertasks[task].inputs]
    return str(decode(pipeline.data_of(task), tensors, name=task))


@app.command()
def run(
    file: PipelineFile,
    inputs: Annotated[
        Path | None, typer.Option(help="A safetensors file with the inputs by name.")
    ] = None,
    random: Annotated[bool, typer.Option("--random", help="Draw the inputs at random.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of what --random draws.")] = 0,
    weights: WeightsFolder = None,
    output: Annotated[
        Path | None,
        typer.Option(callback=writable, help="Write the outputs to this safetensors file."),
    ] = None,
    in_process: InProcess = False,
    timeout: Seconds = 60.0,
    threads: Threads = 1,
    modules: Modules = None,
    trace: TraceFile = None,
    timeline: DrawsTimeline = False,
    repeat: Annotated[int, typer.Option(min=1, help="How many calls to stream.")] = 1,
    npu_as_cpu: NpuAsCpu = False,
) -> None:
    """Run a pipeline file on local processes, or as one rank of torchrun."""
    from shardwright.cli.run import RunOptions, run_file

    run_file(
        file,
        RunOptions(
            inputs=inputs,
            random=random,
            seed=seed,
            weights=weights,
            output=output,
            in_process=in_process,
            timeout=timeout,
            threads=threads,
            modules=tuple(modules or ()),
            trace=trace,
            timeline=timeline,
            repeat=repeat,
            npu_as_cpu=npu_as_cpu,
        ),
    )


@app.command()
def verify(
    file: PipelineFile,
    target: Target,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="How far outputs may differ, of their greatest number.")
    ] = 0.0,
    weights: WeightsFolder = None,
    in_process: InProcess = False,
    timeout: Seconds = 60.0,
    threads: Threads = 1,
    modules: Modules = None,
    npu_as_cpu: NpuAsCpu = False,
) -> None:
    """Run a pipeline file and the model that it is of, with its weights; compare every output."""
    # As in `demo`: equal to the last bit, unless MKL rounds by where arrays lie.
    os.environ.setdefault("MKL_CBWR", "AUTO")
    from shardwright.cli.steps import Steps
    from shardwright.cli.userfiles import UserFiles
    from shardwright.pipeline import Pipeline
    from shardwright.runtime import verify as verify_pipeline
    from shardwright.runtime.verify import other_weights

    console = Console(stderr=True)
    steps = Steps(console)
    with steps.step("make the model"):
        example = UserFiles().example(target)
    pipeline = Pipeline.load(file, weights_in=weights)
    # A model that is made at random has other weights at each time: it is what computes with them
    # that is compared.
    if others := other_weights(pipeline, example.model):
        example.model.load_state_dict(others, strict=False)
        what = f"{next(iter(others))!r}" + f" and {len(others) - 1} more" * (len(others) > 1)
        console.print(f"the model is given the file's weights: {what}", soft_wrap=True)
    with steps.step("run both"):
        report = verify_pipeline(
            pipeline,
            example.model,
            example.args,
            example.kwargs,
            in_process=in_process,
            tolerance=tolerance,
            threads=threads,
            timeout=timeout,
            modules=tuple(modules or ()),
            npu_as_cpu=npu_as_cpu,
        )
    Console().print(str(report), markup=False, highlight=False)


app.command("simulate")(simulate_command)
app.command()(train)


@app.command()
def schema(
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write it here.")] = None,
) -> None:
    """Print the JSON Schema of a pipeline file."""
    from shardwright.pipeline import json_schema_text

    if output is None:
        typer.echo(json_schema_text(), nl=False)
    else:
        with replacing(output) as temporary:
            temporary.write_text(json_schema_text())


@app.command()
def demo(
    directory: Annotated[
        Path | None, typer.Option(help="Keep the pipeline file and the trace here.")
    ] = None,
) -> None:
    """Cut all-MiniLM-L6-v2 in two, run it on two processes, and compare."""
    # It compares to the last bit. On some processors MKL rounds by where arrays lie unless it is
    # told not to; it and the workers read this when they start, so it is said before torch comes.
    os.environ.setdefault("MKL_CBWR", "AUTO")
    from shardwright.cli.demo import run_demo

    run_demo(directory, Console())
