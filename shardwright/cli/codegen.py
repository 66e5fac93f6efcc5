"""``shardwright codegen``: the partitions of a program as a Python file to read and train."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from shardwright.cli.options import writable
from shardwright.cli.splitting import (
    ClusterFile,
    Devices,
    MeshText,
    Microbatches,
    PlanFile,
    PolicyName,
    ProfileFile,
    Told,
    planned,
)
from shardwright.errors import PlanError

if TYPE_CHECKING:
    from shardwright.cli.steps import Steps
    from shardwright.ir import IRGraph
    from shardwright.pipeline import Pipeline
    from shardwright.planning import Plan

STAGE = re.compile(r"^class (Stage\d+\w*)\(", re.MULTILINE)


def codegen(
    target: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py:FUNCTION | FILE.json",
            help="A function that returns (model, args, kwargs), or (step_fn, data) of a training "
            "step, whose forward is written; or a pipeline file.",
        ),
    ],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", callback=writable, help="The Python file to write."),
    ],
    devices: Devices = None,
    cluster: ClusterFile = None,
    policy: PolicyName = None,
    mesh: MeshText = None,
    profile: ProfileFile = None,
    plan: PlanFile = None,
    microbatches: Microbatches = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Put each operator on a line of its own.")
    ] = False,
    modules: Annotated[
        list[str] | None,
        typer.Option(
            "--import", help="A module that registers a pipeline's operators; may be repeated."
        ),
    ] = None,
) -> None:
    """Write each partition of a model as readable Python that imports torch only."""
    from shardwright.cli.steps import Steps
    from shardwright.codegenerate import codegen as generate

    steps = Steps(Console(stderr=True))
    told = Told(
        devices=devices,
        cluster=cluster,
        policy=policy,
        mesh=mesh,
        profile=profile,
        plan=plan,
        microbatches=microbatches,
    )
    source: Pipeline | Plan
    graph: IRGraph | None = None
    if target.endswith(".json"):
        source = _loaded(target, told, modules or (), steps)
    else:
        source, graph = _planned(target, told, modules or (), steps)
    with steps.step("write"):
        written = generate(source, output, verbose=verbose, graph=graph)
    typer.echo(_summary(written))


def _loaded(file: str, told: Told, modules: Sequence[str], steps: Steps) -> Pipeline:
    """A pipeline file. Raises PlanError where it is asked to be split in another way."""
    from shardwright.pipeline import Pipeline
    from shardwright.runtime.operators import load_operators

    given = [f"--{name}" for name in told.given()] + ["--plan"] * (told.plan is not None)
    if given:
        raise PlanError(
            f"{file} is a pipeline, which is split already; leave out {', '.join(given)}, or name "
            "the program, FILE.py:FUNCTION"
        )
    with steps.step("load"):
        pipeline = Pipeline.load(file)
        load_operators(pipeline, modules)
    return pipeline


def _planned(target: str, told: Told, modules: Sequence[str], steps: Steps) -> tuple[Plan, IRGraph]:
    from shardwright.cli.userfiles import UserFiles

    if modules:
        raise PlanError("--import is for pipeline files; a program imports what it needs itself")
    files = UserFiles()
    with steps.step("make the program"):
        program = files.either(target)
    graph, plan = planned(program, files, told, steps)
    return plan, graph


def _summary(file: Path) -> str:
    """How long a generated file is, and what stages are in it."""
    text = file.read_text(encoding="utf-8")
    return f"{file}: {len(text.splitlines())} lines, {', '.join(STAGE.findall(text))}"
