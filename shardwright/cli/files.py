"""Commands on a pipeline file: check, show, run, verify, simulate, lower, schema."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from shardwright.atomic import replacing
from shardwright.cli.options import (
    ClusterFile,
    DrawsTimeline,
    Modules,
    NpuAsCpu,
    PipelineOrBundle,
    PipelineOutput,
    Target,
    TraceFile,
    WeightsFolder,
    WorkerOptions,
    writable,
)
from shardwright.errors import InputError, ProfileError

if TYPE_CHECKING:
    from shardwright.costs import Costs, TaskTimes
    from shardwright.pipeline import Pipeline


def check(
    file: PipelineOrBundle,
    weights: Annotated[
        bool, typer.Option("--weights", help="Check the parameter files too.")
    ] = False,
) -> None:
    """Check a pipeline file against every rule of the format."""
    from shardwright.cli.steps import Steps
    from shardwright.pipeline import Bundle
    from shardwright.pipeline.bundle import load_either
    from shardwright.reporting import headline

    with Steps(Console(stderr=True)).step("check"):
        found = load_either(file)
        pipelines = [*found.pipelines.values()] if isinstance(found, Bundle) else [found]
        for pipeline in pipelines if weights else ():
            pipeline.weights.check(pipeline.tensors)
    for pipeline in pipelines:
        Console().print("OK:", headline(pipeline))


def show(
    file: PipelineOrBundle,
    task: Annotated[str | None, typer.Option(help="Print this task's graph instead.")] = None,
    schedule: Annotated[
        bool, typer.Option("--schedule", help="Print the schedule of a training step instead.")
    ] = False,
    memory: Annotated[
        bool, typer.Option("--memory", help="With --task, the memory plan of a lowered graph.")
    ] = False,
) -> None:
    """Show the contents of a pipeline file: devices, tasks, bytes, communication."""
    from shardwright.compiler.tasks import task_plan
    from shardwright.pipeline import Bundle
    from shardwright.pipeline.bundle import first_of, load_either
    from shardwright.reporting import overview

    if schedule and (task is not None or memory):
        raise InputError("--schedule shows the whole file; leave --task and --memory out")
    if memory and task is None:
        raise InputError("--memory shows one task's; name a lowered one with --task")
    found = load_either(file)
    pipeline = first_of(found)
    if isinstance(found, Bundle):
        typer.echo(f"{found}\nthe first pipeline:")
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
    """The graph of a compute task, one node or kernel call a line. Raises InputError."""
    from shardwright.kernels.files import decode as decode_lowered
    from shardwright.pipeline.fxtext import decode
    from shardwright.pipeline.rules import COMPUTE_KINDS

    tasks = pipeline.supertasks
    computing = [name for name, known in tasks.items() if known.kind in COMPUTE_KINDS]
    if task not in computing:
        raise InputError(f"{task!r} has no graph; tasks that have: {', '.join(computing)}")
    if tasks[task].kind == "dfg":
        return str(decode_lowered(pipeline.data_of(task), name=task))
    tensors = [pipeline.tensors[name] for name in pipeline.supertasks[task].inputs]
    return str(decode(pipeline.data_of(task), tensors, name=task))


def run(
    file: PipelineOrBundle,
    options: WorkerOptions,
    inputs: Annotated[
        Path | None, typer.Option(help="Safetensors file with the inputs by name.")
    ] = None,
    random: Annotated[bool, typer.Option("--random", help="Use random inputs.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of --random.")] = 0,
    weights: WeightsFolder = None,
    output: Annotated[
        Path | None,
        typer.Option(callback=writable, help="Write the outputs to this safetensors file."),
    ] = None,
    trace: TraceFile = None,
    timeline: DrawsTimeline = False,
    repeat: Annotated[int, typer.Option(min=1, help="Number of calls to stream.")] = 1,
    npu_as_cpu: NpuAsCpu = False,
) -> None:
    """Run a pipeline file on local processes, or as one rank of torchrun; rank 0 prints."""
    from shardwright.cli.steps import Steps
    from shardwright.cli.tensors import (
        as_call,
        output_table,
        outputs_by_name,
        random_inputs,
        read_inputs,
    )
    from shardwright.ir.tensor_meta import seconds_text
    from shardwright.pipeline import write_paramfile
    from shardwright.pipeline.bundle import first_of, load_either
    from shardwright.reporting import TimelineChart, slot_table, task_table
    from shardwright.runtime import Runner

    if random == (inputs is not None):
        raise InputError("give either --inputs FILE or --random")
    is_rank_zero = os.environ.get("RANK", "0") == "0"
    steps = Steps(Console(stderr=True), quiet=not is_rank_zero)
    with steps.step("load"):
        pipeline = load_either(file, weights_in=weights)
        first = first_of(pipeline)
        tensors = random_inputs(first, seed) if inputs is None else read_inputs(inputs)
        call = as_call(first, tensors)
    with steps.step("start"):
        runner = Runner(
            pipeline,
            **options.arguments(),
            trace=timeline or trace is not None,
            npu_as_cpu=npu_as_cpu,
        )
    with runner:
        with steps.step("run"):
            start = time.perf_counter()
            futures = [runner.submit(*call.args, **call.kwargs) for _ in range(repeat)]
            result = [future.result() for future in futures][-1]
            seconds = time.perf_counter() - start
        found = runner.timeline
    if not is_rank_zero:
        return
    console, outputs = Console(), outputs_by_name(result)
    if output is not None:
        write_paramfile(output, outputs)
    if trace is not None:
        found.save_chrome_trace(trace)
    console.print(output_table(outputs))
    if repeat > 1:
        each = seconds_text(seconds / repeat)
        console.print(f"{repeat} calls in {seconds_text(seconds)}: {each} a call")
    if timeline:
        console.print("", TimelineChart(found.events), "", sep="\n")
        console.print(slot_table(found), "", task_table(found), sep="\n")


def verify(
    file: PipelineOrBundle,
    target: Target,
    options: WorkerOptions,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Largest difference, relative to the largest value.")
    ] = 0.0,
    weights: WeightsFolder = None,
    npu_as_cpu: NpuAsCpu = False,
) -> None:
    """Compare every output of a pipeline file with its model, with the file's weights."""
    # As in `demo`: bitwise equality needs it where MKL rounds by where arrays lie.
    os.environ.setdefault("MKL_CBWR", "AUTO")
    from shardwright.cli.steps import Steps
    from shardwright.cli.userfiles import UserFiles
    from shardwright.pipeline.bundle import load_either
    from shardwright.runtime import verify as verify_pipeline
    from shardwright.runtime.verify import other_weights

    console = Console(stderr=True)
    steps = Steps(console)
    with steps.step("make the model"):
        example = UserFiles().example(target)
    pipeline = load_either(file, weights_in=weights)
    # A model with random weights has other ones each time it is made.
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
            tolerance=tolerance,
            npu_as_cpu=npu_as_cpu,
            **options.arguments(),
        )
    Console().print(str(report), markup=False, highlight=False)


def simulate(
    file: PipelineOrBundle,
    cluster: ClusterFile = None,
    calls: Annotated[int, typer.Option(min=1, help="Number of consecutive steps or calls.")] = 1,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Measure the tasks on this machine; otherwise estimate."),
    ] = False,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Threads of each worker that measures.", show_default="1"),
    ] = None,
    times: Annotated[
        Path | None, typer.Option(help="Use the times that --save-times wrote.")
    ] = None,
    save_times: Annotated[
        Path | None,
        typer.Option(callback=writable, help="Write the times of --measure as JSON."),
    ] = None,
    modules: Modules = None,
    trace: TraceFile = None,
    timeline: DrawsTimeline = False,
) -> None:
    """Simulate a pipeline file: time, waits between devices, and memory of each device.

    Of a bundle's folder it is the first pipeline.
    """
    if measure and times is not None:
        raise ProfileError("--times takes the place of --measure; leave one of them out")
    if save_times is not None and not measure:
        raise ProfileError("--save-times writes what --measure finds; give that too")
    if threads is not None and not measure:
        raise ProfileError("--threads are those that measure; give --measure too, or leave it out")

    from shardwright.cli.steps import Steps
    from shardwright.clusters import Cluster
    from shardwright.costs import Analytic, TaskTimes
    from shardwright.engine.program import is_training
    from shardwright.ir.tensor_meta import seconds_text
    from shardwright.pipeline.bundle import first_of
    from shardwright.reporting import TimelineChart, simulated_memory_table, simulation_table
    from shardwright.runtime import profile_tasks
    from shardwright.simulation.simulate import simulate as simulate_pipeline

    steps = Steps(Console(stderr=True))
    with steps.step("load"):
        pipeline = first_of(file)
        machines = Cluster.load(cluster) if cluster else Cluster((tuple(pipeline.devices),))
    costs: Costs | TaskTimes = Analytic(machines.device)
    if measure:
        with steps.step("measure"):
            costs = profile_tasks(pipeline, threads or 1, modules=tuple(modules or ()))
        if save_times is not None:
            costs.save(save_times)
    elif times is not None:
        costs = TaskTimes.load(times)
    with steps.step("simulate"):
        found = simulate_pipeline(pipeline, costs, machines, calls=calls)
    if trace is not None:
        found.save_chrome_trace(trace)
    noun = "step" if is_training(pipeline) else "call"
    text = f"a {noun} takes {seconds_text(found.step_time)}"
    if found.calls > 1:
        text += f", {found.calls} of them {seconds_text(found.seconds)}"
    console = Console()
    console.print(text, highlight=False)
    if timeline:
        console.print("", TimelineChart(found.events), "", sep="\n")
    console.print(simulation_table(found), "", simulated_memory_table(found), sep="\n")


def lower(file: PipelineOrBundle, output: PipelineOutput, modules: Modules = None) -> None:
    """Lower the tasks of a pipeline file from operators to kernel calls."""
    from shardwright.cli.steps import Steps
    from shardwright.compiler import lower as lower_pipeline
    from shardwright.launch.operators import load_operators
    from shardwright.pipeline.bundle import first_of, load_either
    from shardwright.reporting import device_table, headline

    steps = Steps(Console(stderr=True))
    with steps.step("load"):
        pipeline = load_either(file)
        load_operators(first_of(pipeline), modules or ())
    with steps.step("lower"):
        lowered = lower_pipeline(pipeline)
    with steps.step("save"):
        lowered.save(output)
    first = first_of(lowered)
    Console().print(headline(first), device_table(first), sep="\n")


def schema(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write it to this file.")
    ] = None,
) -> None:
    """Print the JSON Schema of a pipeline file."""
    from shardwright.pipeline import json_schema_text

    if output is None:
        typer.echo(json_schema_text(), nl=False)
    else:
        with replacing(output) as temporary:
            temporary.write_text(json_schema_text())
