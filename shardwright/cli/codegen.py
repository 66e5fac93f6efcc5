"""``shardwright codegen``: the partitions of a program as a Python file to read and train."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

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

STAGE = re.compile(r"^class (Stage\d+\w*)\(", re.MULTILINE)


def codegen(
    target: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py:FUNCTION",
            help="A function that returns (model, args, kwargs), or (step_fn, data) of a training "
            "step, whose forward is written.",
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
) -> None:
    """Write each partition of a model as readable Python that imports torch only."""
    from shardwright.cli.steps import Steps
    from shardwright.cli.userfiles import UserFiles
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
    if target.endswith(".json"):
        raise PlanError(
            f"{target} has tasks of devices, not the model's modules; name the program, "
            "FILE.py:FUNCTION, with --plan if the file was built from one"
        )
    files = UserFiles()
    with steps.step("make the program"):
        program = files.either(target)
    graph, plan_found = planned(program, files, told, steps)
    with steps.step("write"):
        written = generate(plan_found, output, verbose=verbose, graph=graph)
    typer.echo(_summary(written))


def _summary(file: Path) -> str:
    """How long a generated file is, and what stages are in it."""
    text = file.read_text(encoding="utf-8")
    return f"{file}: {len(text.splitlines())} lines, {', '.join(STAGE.findall(text))}"
