"""``shardwright plan``: which slots run which part of a user's program, and two plans compared."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from shardwright.cli.options import writable
from shardwright.cli.splitting import (
    Chunks,
    ClusterFile,
    Devices,
    Memory,
    MeshText,
    Microbatches,
    PolicyName,
    ProfileFile,
    Recompute,
    ScheduleName,
    Told,
    Zero,
    planned,
)
from shardwright.errors import PlanError

if TYPE_CHECKING:
    from shardwright.planning import Plan


def plan(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE.py:FUNCTION | PLAN.json",
            help="A function that returns (model, args, kwargs), or (step_fn, data) of a training "
            "step; or a plan to print.",
        ),
    ] = None,
    devices: Devices = None,
    cluster: ClusterFile = None,
    policy: PolicyName = None,
    mesh: MeshText = None,
    profile: ProfileFile = None,
    microbatches: Microbatches = None,
    schedule: ScheduleName = None,
    chunks: Chunks = None,
    recompute: Recompute = None,
    memory: Memory = None,
    zero: Zero = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", callback=writable, help="Write the plan to this file."),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say why, of a plan that was searched for.")
    ] = False,
    diff: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="A.json B.json", help="Say what differs between two plans instead."),
    ] = None,
) -> None:
    """Plan a model or a training step: stages, splits, schedule; or print or compare plans."""
    told = Told(
        devices=devices,
        cluster=cluster,
        policy=policy,
        mesh=mesh,
        profile=profile,
        microbatches=microbatches,
        schedule=schedule,
        chunks=chunks,
        recompute=recompute,
        memory=memory,
        zero=zero,
    )
    if diff is not None:
        _compare(diff, [target, output, explain or None, *told.given().values()])
        return
    if target is None:
        raise PlanError("name a program, FILE.py:FUNCTION, or two plans with --diff")

    from shardwright.planning import Plan
    from shardwright.training.choosing import check_alone

    if target.endswith(".json"):
        check_alone({f"--{name}": value for name, value in told.given().items()})
        made = Plan.load(target)
    else:
        made = _made(target, told)
    if output is not None:
        made.save(output)
    typer.echo(made.explain() if explain else str(made))


def _made(target: str, told: Told) -> Plan:
    from shardwright.cli.steps import Steps
    from shardwright.cli.userfiles import UserFiles

    steps, files = Steps(Console(stderr=True)), UserFiles()
    with steps.step("make the program"):
        program = files.either(target)
    return planned(program, files, told, steps)[1]


def _compare(paths: tuple[Path, Path], others: list[object]) -> None:
    if any(other is not None for other in others):
        raise PlanError("--diff compares two plan files; leave the other options out")

    from shardwright.planning import Plan, difference

    first, second = map(Plan.load, paths)
    typer.echo(str(difference(first, second)))
