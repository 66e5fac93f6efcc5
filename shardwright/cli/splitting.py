"""The options that say how a graph is split, and the graph and plan that they ask for.

In come a program that a user's file makes, a model or a training step, and options. Out come its
graph and a plan for it: from a file where ``--plan`` names one, else made as the others say. An
option that was not given is None, and `plan` has the default.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwright.errors import PlanError

if TYPE_CHECKING:
    from shardwright.cli.steps import Steps
    from shardwright.cli.userfiles import Example, TrainingProgram, UserFiles
    from shardwright.ir import IRGraph
    from shardwright.planning import Plan

DEVICES = 2
"""Slots, where no option says how many."""
POLICY = "pipeline"

# What the planner and the schedules have, told without importing them; a test holds them equal.
AUTO = "auto"
PARTITIONERS = ("metis", "memory", "pipedream")
POLICIES = ("pipeline", "data", "tensor", "sequence", *PARTITIONERS, AUTO)
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
RECOMPUTE = ("none", "full", "auto")

Devices = Annotated[
    int | None, typer.Option(help=f"How many device slots; {DEVICES} where nothing says.")
]
ClusterFile = Annotated[
    Path | None,
    typer.Option("--cluster", help="A YAML file of the machines: hosts, devices, links."),
]
PolicyName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE.py:FUNCTION",
        help=f"How the graph is split: {', '.join(POLICIES)}, or, of a model, a function that "
        f"decides; {POLICY} by default.",
    ),
]
MeshText = Annotated[
    str | None,
    typer.Option(metavar="AXIS=SIZE,…", help="Several policies at once: pipeline=2,tensor=2."),
]
ProfileFile = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        help=f"What shardwright profile measured, for --policy {AUTO}, {', '.join(PARTITIONERS)}.",
    ),
]
PlanFile = Annotated[
    Path | None,
    typer.Option("--plan", help="A plan that shardwright plan wrote, in place of these options."),
]
Microbatches = Annotated[
    int | None, typer.Option(min=1, help="In how many microbatches a training step's batch is cut.")
]
ScheduleName = Annotated[
    str | None, typer.Option(help=f"Of a training step: {', '.join(SCHEDULES)}; 1f1b by default.")
]
Chunks = Annotated[int | None, typer.Option(min=1, help="Virtual stages of each pipeline rank.")]
Recompute = Annotated[
    str | None, typer.Option(help=f"Which activations are computed again: {', '.join(RECOMPUTE)}.")
]
Memory = Annotated[int | None, typer.Option(help="Bytes a slot, for --recompute auto.")]
Zero = Annotated[
    int | None, typer.Option(help="1: split the optimizer's state along the axis data.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What the options say; None is an option that was not given.

    ``policy`` is a name or ``FILE.py:function``; ``mesh`` is ``pipeline=2,tensor=2``.
    """

    devices: int | None = None
    cluster: Path | None = None
    policy: str | None = None
    mesh: str | None = None
    plan: Path | None = None
    profile: Path | None = None
    microbatches: int | None = None
    schedule: str | None = None
    chunks: int | None = None
    recompute: str | None = None
    memory: int | None = None
    zero: int | None = None

    def given(self) -> dict[str, Any]:
        """The options that were given, but for the plan."""
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name != "plan" and getattr(self, field.name) is not None
        }

    def splits(self) -> bool:
        """Whether an option says how a program is split, or for what it is."""
        said = (self.devices, self.cluster, self.policy, self.mesh, self.plan)
        return any(option is not None for option in said)

    def asked(self, files: UserFiles) -> dict[str, Any]:
        """The arguments of `plan` that the options give. Raises PlanError."""
        from shardwright.clusters import Cluster
        from shardwright.costs import Profile

        if self.mesh is not None and self.policy not in (None, *PARTITIONERS):
            raise PlanError(
                "give either --policy or --mesh, whose axes are policies; beside a mesh stand "
                f"only policies that make its stages: {', '.join(PARTITIONERS)}"
            )
        if self.cluster is not None and self.devices is not None:
            raise PlanError("give either --devices or --cluster, which says how many there are")
        asked = self.given()
        if self.mesh is not None:
            asked["mesh"] = parse_mesh(self.mesh)
        else:
            asked.setdefault("devices", DEVICES)
        if self.cluster is not None:
            asked["devices"] = Cluster.load(asked.pop("cluster"))
        if self.profile is not None:
            asked["profile"] = Profile.load(self.profile)
        if self.policy is not None and ":" in self.policy:
            asked["policy"] = files.policy(self.policy)
        return asked


def graph_of(program: Example | TrainingProgram, microbatches: int) -> IRGraph:
    """The graph of a model, or of a training step on one of its microbatches."""
    from shardwright.cli.userfiles import Example
    from shardwright.tracing import capture
    from shardwright.training.loading import Loading
    from shardwright.training.program import TrainingProgram

    if isinstance(program, Example):
        return capture(*program)
    batch = Loading(program.data, seed=0).first()
    return TrainingProgram(program.step_fn, batch, microbatches=microbatches, seed=0).graph


def planned(
    program: Example | TrainingProgram, files: UserFiles, told: Told, steps: Steps
) -> tuple[IRGraph, Plan]:
    """The graph of a program, and the plan that the options ask for.

    Raises CaptureError, PlanError, InputError.
    """
    from shardwright.cli.userfiles import Example
    from shardwright.planning import Plan
    from shardwright.tracing import capture
    from shardwright.training.choosing import check_alone, program_with
    from shardwright.training.loading import Loading

    chosen = None
    if told.plan is not None:
        check_alone({f"--{name}": value for name, value in told.given().items()})
        chosen = Plan.load(told.plan)
    asked = {} if chosen is not None else told.asked(files)
    if isinstance(program, Example):
        with steps.step("capture"):
            graph = capture(*program)
        with steps.step("plan"):
            return graph, _for_model(graph, chosen, asked)
    with steps.step("capture and plan"):
        first = Loading(program.data, seed=0).first()
        step, made = program_with(program.step_fn, first, asked, plan=chosen)
        return step.graph, made


def _for_model(graph: IRGraph, chosen: Plan | None, asked: dict[str, Any]) -> Plan:
    from shardwright.planner import plan
    from shardwright.planning.plan import check_belongs

    if chosen is None:
        return plan(graph, **asked)
    check_belongs(chosen, graph)
    return chosen


def parse_mesh(text: str) -> dict[str, int]:
    """Sizes by axis of ``pipeline=2,tensor=2``. Raises PlanError."""
    sizes: dict[str, int] = {}
    for entry in text.split(","):
        axis, _, size = entry.strip().partition("=")
        if not (axis and size.isdecimal()) or axis in sizes:
            raise PlanError(
                f"the mesh {text!r} is wrong at {entry.strip()!r}; expected axes and sizes, each "
                "axis once: pipeline=2,tensor=2"
            )
        sizes[axis] = int(size)
    return sizes
