"""``shardwright draw``: a picture of a user's program, by a plan and by times."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from shardwright.cli.options import Target, writable
from shardwright.cli.splitting import (
    AUTO,
    PARTITIONERS,
    ClusterFile,
    Devices,
    MeshText,
    Microbatches,
    PlanFile,
    PolicyName,
    ProfileFile,
    Told,
    graph_of,
    planned,
)

if TYPE_CHECKING:
    from shardwright.costs import Costs, Profile
    from shardwright.planning import Plan


def draw(
    target: Target,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", callback=writable, help="The .svg, .png, .pdf or .dot to write."
        ),
    ],
    devices: Devices = None,
    cluster: ClusterFile = None,
    policy: PolicyName = None,
    mesh: MeshText = None,
    plan: PlanFile = None,
    profile: ProfileFile = None,
    microbatches: Microbatches = None,
    depth: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="How far down the tree of modules: 0 is a box for each part, 1 the modules that "
            "the program consists of; as far as it stays legible if not given.",
        ),
    ] = None,
    no_fold: Annotated[
        bool, typer.Option("--no-fold", help="Draw equal layers one by one.")
    ] = False,
) -> None:
    """Draw a model or a training step: coloured by a plan, sized by time, edges by bytes.

    Times are a profile's, or estimated from shapes; --policy auto and those that put nodes in
    stages, metis and its like, plan by the profile too. Without options of a plan nothing is cut.
    """
    from shardwright.cli.steps import Steps
    from shardwright.cli.userfiles import UserFiles
    from shardwright.reporting import draw as draw_graph
    from shardwright.reporting.dot import check_format

    check_format(output)
    steps, files = Steps(Console(stderr=True)), UserFiles()
    told = Told(
        devices=devices,
        cluster=cluster,
        policy=policy,
        mesh=mesh,
        plan=plan,
        microbatches=microbatches,
        profile=profile if policy in (AUTO, *PARTITIONERS) else None,
    )
    with steps.step("make the program"):
        program = files.either(target)
    chosen: Plan | None = None
    if told.splits():
        graph, chosen = planned(program, files, told, steps)
    else:
        with steps.step("capture"):
            graph = graph_of(program, microbatches or 1)
    costs, said = _costs(profile, chosen)
    with steps.step("draw"):
        draw_graph(
            graph,
            output,
            plan=chosen,
            profile=costs,
            fold=not no_fold,
            depth=depth,
            caption=said,
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
