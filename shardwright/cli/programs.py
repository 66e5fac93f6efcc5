"""Commands on a user's program, a model or a training step: plan, build, draw, codegen, profile."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from shardwright.cli.options import (
    AUTO,
    PARTITIONERS,
    DynamicOptions,
    Microbatches,
    PipelineOutput,
    PlanFile,
    PlanOptions,
    SlotKind,
    SplitOptions,
    Target,
    writable,
)
from shardwright.errors import PlanError, ProfileError

if TYPE_CHECKING:
    from shardwright.costs import Costs, Profile
    from shardwright.planning import Plan


def build(
    target: Target,
    output: PipelineOutput,
    options: PlanOptions,
    dynamic: DynamicOptions,
    plan: PlanFile = None,
    weights: Annotated[
        Path | None,
        typer.Option(help="Safetensors file, index of a sharded one, or folder of either."),
    ] = None,
    device_kind: SlotKind = "cpu",
    plain: Annotated[
        bool, typer.Option("--plain", help="Write the specification's keys only.")
    ] = False,
) -> None:
    """Capture a model or a training step, split it, and write a pipeline file or a bundle."""
    from shardwright.building import build as build_pipeline
    from shardwright.cli.steps import Steps
    from shardwright.cli.userfiles import UserFiles, plan_program, plan_programs
    from shardwright.reporting import device_table, headline

    steps, files = Steps(Console(stderr=True)), UserFiles()
    with steps.step("make the program"):
        program = files.either(target)
    if varying := dynamic.arguments():
        wanted = dynamic.wanted()
        programs, found = plan_programs(program, varying, files, options, steps, plan)
        with steps.step("build"):
            bundle = build_pipeline(programs, found, weights, device_kind=device_kind)
            for sizes in wanted:
                bundle.at(**programs.shapes.rounded(sizes))
        with steps.step("save"):
            bundle.save(output, plain=plain)
        pipeline = bundle.first
        typer.echo(str(bundle))
    else:
        graph, found = plan_program(program, files, options, steps, plan)
        with steps.step("build"):
            pipeline = build_pipeline(graph, found, weights, device_kind=device_kind)
        with steps.step("save"):
            pipeline.save(output, plain=plain)
    Console().print(headline(pipeline), device_table(pipeline), sep="\n")


def plan(
    options: PlanOptions,
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE.py:FUNCTION | PLAN.json",
            help="A function that returns (model, args, kwargs), or (step_fn, data) of a training "
            "step; or a plan to print.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", callback=writable, help="Write the plan to this file."),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Explain why the search chose the plan.")
    ] = False,
    diff: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="A.json B.json", help="Print the differences of two plans."),
    ] = None,
) -> None:
    """Plan a model or a training step: stages, splits, schedule; or print or compare plans."""
    if diff is not None and (target or output or explain or options.given()):
        raise PlanError("--diff compares two plan files; leave the other options out")
    if diff is None and target is None:
        raise PlanError("name a program, FILE.py:FUNCTION, or two plans with --diff")

    from shardwright.cli.steps import Steps
    from shardwright.cli.userfiles import UserFiles, load_plan, plan_program
    from shardwright.planning import Plan, difference

    if diff is not None:
        typer.echo(str(difference(*map(Plan.load, diff))))
        return
    assert target is not None
    if target.endswith(".json"):
        found = load_plan(Path(target), options)
    else:
        steps, files = Steps(Console(stderr=True)), UserFiles()
        with steps.step("make the program"):
            program = files.either(target)
        found = plan_program(program, files, options, steps)[1]
    if output is not None:
        found.save(output)
    typer.echo(found.explain() if explain else str(found))


def draw(
    target: Target,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", callback=writable, help="The .svg, .png, .pdf or .dot to write."
        ),
    ],
    options: SplitOptions,
    plan: PlanFile = None,
    depth: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Depth in the tree of modules: 0 draws a box per stage, 1 the modules that the "
            "program consists of; by default as far as the picture is legible.",
        ),
    ] = None,
    no_fold: Annotated[
        bool, typer.Option("--no-fold", help="Draw every layer, also equal ones.")
    ] = False,
) -> None:
    """Draw a model or a training step: colours by plan, sizes by time, edges by bytes.

    Times are a profile's, or estimated from shapes. Without options of a plan nothing is cut.
    """
    from shardwright.cli.steps import Steps
    from shardwright.cli.userfiles import UserFiles, capture_program, plan_program
    from shardwright.reporting import draw as draw_graph
    from shardwright.reporting.dot import check_format

    check_format(output)
    steps, files = Steps(Console(stderr=True)), UserFiles()
    with steps.step("make the program"):
        program = files.either(target)
    found: Plan | None = None
    if plan is not None or options.given().keys() & {"devices", "cluster", "policy", "mesh"}:
        by_times = options.policy in (AUTO, *PARTITIONERS)
        told = options if by_times else options.without_profile()
        graph, found = plan_program(program, files, told, steps, plan)
    else:
        with steps.step("capture"):
            graph = capture_program(program, options.microbatches or 1)
    costs, caption = _costs(options.profile, found)
    with steps.step("draw"):
        draw_graph(
            graph, output, plan=found, profile=costs, fold=not no_fold, depth=depth, caption=caption
        )


def _costs(profile: Path | None, plan: Plan | None) -> tuple[Profile | Costs, str]:
    """What nodes cost, and in words where that is from."""
    from shardwright.clusters import CPU_CORE
    from shardwright.costs import Analytic, Profile
    from shardwright.planning.plan import cluster_of

    if profile is not None:
        found = Profile.load(profile)
        return found, f"times measured on {found.device}, or estimated where nothing was measured"
    device = CPU_CORE if plan is None else cluster_of(plan).device
    return Analytic(device), f"times estimated from shapes for {device.name}"


STAGE = re.compile(r"^class (Stage\d+\w*)\(", re.MULTILINE)


def codegen(
    target: Target,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", callback=writable, help="The Python file to write."),
    ],
    options: SplitOptions,
    plan: PlanFile = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Put each operator on a line of its own.")
    ] = False,
) -> None:
    """Write each partition of a model as readable Python that imports torch only.

    Of a training step the forward is written.
    """
    from shardwright.cli.steps import Steps
    from shardwright.cli.userfiles import UserFiles, plan_program
    from shardwright.codegenerate import codegen as generate

    if target.endswith(".json"):
        raise PlanError(
            f"{target} has tasks of devices, not the model's modules; name the program, "
            "FILE.py:FUNCTION, with --plan if the file was built from one"
        )
    steps, files = Steps(Console(stderr=True)), UserFiles()
    with steps.step("make the program"):
        program = files.either(target)
    graph, found = plan_program(program, files, options, steps, plan)
    with steps.step("write"):
        written = generate(found, output, verbose=verbose, graph=graph)
    text = written.read_text(encoding="utf-8")
    typer.echo(f"{written}: {len(text.splitlines())} lines, {', '.join(STAGE.findall(text))}")


def profile(
    target: Target,
    depth: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Depth in the tree of modules: 0 is the whole program, 1 the modules that it "
            "consists of; by default every operator by itself.",
        ),
    ] = None,
    basic_blocks: Annotated[
        list[str] | None,
        typer.Option("--basic-block", help="Module class to measure whole; may be repeated."),
    ] = None,
    samples: Annotated[
        int, typer.Option("--n-iter", min=1, help="Samples, of which times are medians.")
    ] = 10,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Recompute the forward in the backward.")
    ] = False,
    microbatches: Microbatches = None,
    device: Annotated[str, typer.Option(help="Device to measure: cpu, cuda, cuda:1.")] = "cpu",
    threads: Annotated[int, typer.Option(min=1, help="Number of threads.")] = 1,
    cache: Annotated[
        Path | None, typer.Option(help="Cache directory of measurements; the user's by default.")
    ] = None,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Measure everything again, without a cache.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", callback=writable, help="Write the profile as JSON."),
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
    from shardwright.cli.userfiles import UserFiles, capture_program
    from shardwright.costs.profile import chart_format
    from shardwright.profiling import profile as profile_graph

    if plot is not None:
        chart_format(plot)
    steps, files = Steps(Console(stderr=True)), UserFiles()
    with steps.step("make the program"):
        program = files.either(target)
    with steps.step("capture"):
        graph = capture_program(program, microbatches or 1)
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


def cluster(
    file: Annotated[
        Path | None,
        typer.Argument(help="Cluster file to check and print; this machine by default."),
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(min=1, help="Number of devices; by default all cores or GPUs."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Kind of each device: cpu (default) or cuda.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of each CPU device; 1 by default.")
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option("--n-iter", min=1, help="Samples, of which times are medians; 10 by default."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", callback=writable, help="Write the cluster file here."),
    ] = None,
) -> None:
    """Measure this machine (rates, memory, links) and print it as a cluster file."""
    measured = {"--devices": devices, "--device": device, "--threads": threads, "--n-iter": samples}
    given = [name for name, value in measured.items() if value is not None]
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
