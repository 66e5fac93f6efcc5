"""Options that several commands have, and groups of them as dataclasses.

A command takes a group as one parameter; `with_options` puts the group's fields in its place.
Fields have the names of the arguments that they become, so a group is passed on whole.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Self, get_type_hints

import typer

from shardwright.atomic import check_writable
from shardwright.devices import DeviceKind
from shardwright.errors import InputError, PlanError

DEVICES = 2
"""How many devices a plan is for where no option says it."""
POLICY = "pipeline"

# Names of the planner, the schedules and the format, without importing them; a test compares.
AUTO = "auto"
PARTITIONERS = ("metis", "memory", "pipedream")
POLICIES = ("pipeline", "data", "tensor", "sequence", *PARTITIONERS, AUTO)
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
RECOMPUTE = ("none", "full", "auto")
BUNDLE_INDEX = "bundle.json"


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with each parameter that is a group of options replaced by the group's fields."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters = []
    for parameter in inspect.signature(command).parameters.values():
        if (group := groups.get(parameter.name)) is None:
            parameters.append((parameter.name, parameter.default, hints[parameter.name]))
        else:
            types = get_type_hints(group, include_extras=True)
            parameters += [(each.name, each.default, types[each.name]) for each in fields(group)]

    @functools.wraps(command)
    def called(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{each.name: given.pop(each.name) for each in fields(group)})
        command(**given)

    kind = inspect.Parameter.KEYWORD_ONLY
    called.__annotations__ = {name: hint for name, _, hint in parameters}
    called.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, kind, default=default, annotation=hint)
            for name, default, hint in parameters
        ]
    )
    return called


def as_arguments(group: Any) -> dict[str, Any]:
    """The options of a group by name."""
    return {each.name: getattr(group, each.name) for each in fields(group)}


def writable(path: Path | None) -> Path | None:
    """The path of a file to write, known to be writable before any work is done for it.

    Of torchrun's ranks the first writes, maybe on another host. Raises InputError.
    """
    is_bundle = path is not None and (path / BUNDLE_INDEX).is_file()
    if path is not None and not is_bundle and os.environ.get("RANK", "0") == "0":
        try:
            check_writable(path)
        except OSError as error:
            raise InputError(
                f"{path} cannot be written: {error.strerror}; give the path of a file in a "
                "directory that there is"
            ) from None
    return path


Target = Annotated[
    str,
    typer.Argument(
        metavar="FILE.py:FUNCTION",
        help="A function that returns (model, args, kwargs), or (step_fn, data) of a training "
        "step.",
    ),
]
PipelineOrBundle = Annotated[
    Path, typer.Argument(metavar="FILE", help="A pipeline file, or a bundle's folder.")
]
PipelineOutput = Annotated[
    Path,
    typer.Option("--output", "-o", callback=writable, help="The pipeline file to write."),
]
Modules = Annotated[
    list[str] | None,
    typer.Option("--import", help="Module that registers operators; may be repeated."),
]
SlotKind = Annotated[DeviceKind, typer.Option("--device-kind", help="Kind of every device.")]
NpuAsCpu = Annotated[bool, typer.Option("--npu-as-cpu", help="Run npu devices on the CPU.")]
TraceFile = Annotated[
    Path | None,
    typer.Option("--trace", callback=writable, help="Write the timeline as a Chrome trace."),
]
DrawsTimeline = Annotated[bool, typer.Option("--timeline", help="Draw the timeline.")]
WeightsFolder = Annotated[
    Path | None,
    typer.Option(
        "--weights",
        exists=True,
        file_okay=False,
        help="Another folder that may hold the file's parameter files.",
    ),
]
ClusterFile = Annotated[
    Path | None,
    typer.Option("--cluster", help="YAML file of the machines: hosts, devices, links."),
]
PlanFile = Annotated[
    Path | None,
    typer.Option("--plan", help="Plan written by shardwright plan, instead of these options."),
]
Microbatches = Annotated[
    int | None, typer.Option(min=1, help="Number of microbatches of a training step.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """How a pipeline's devices are run; the arguments of a `Runner`."""

    in_process: Annotated[
        bool, typer.Option("--in-process", help="Run all devices in this process.")
    ] = False
    timeout: Annotated[float, typer.Option(help="Seconds that one operation may take.")] = 60.0
    threads: Annotated[int, typer.Option(min=1, help="Number of threads of each worker.")] = 1
    modules: Modules = None

    def arguments(self) -> dict[str, Any]:
        """The arguments of a `Runner`, or of `train`."""
        return {**as_arguments(self), "modules": tuple(self.modules or ())}


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitOptions:
    """How a program is split over which devices; None is an option that was not given."""

    devices: Annotated[int | None, typer.Option(help="Number of devices.")] = None
    cluster: ClusterFile = None
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE.py:FUNCTION",
            help=f"How to split the graph: {', '.join(POLICIES)}, or, for a model, a function that "
            f"decides; {POLICY} by default.",
        ),
    ] = None
    mesh: Annotated[
        str | None,
        typer.Option(
            metavar="AXIS=SIZE,…", help="Several policies with their sizes: pipeline=2,tensor=2."
        ),
    ] = None
    profile: Annotated[
        Path | None,
        typer.Option(
            "--profile",
            help=f"Profile written by shardwright profile, for --policy {AUTO}, "
            f"{', '.join(PARTITIONERS)}.",
        ),
    ] = None
    microbatches: Microbatches = None

    def given(self) -> dict[str, Any]:
        """The options that were given."""
        return {name: value for name, value in as_arguments(self).items() if value is not None}

    def without_profile(self) -> Self:
        """The same, for policies that ask for no times."""
        return replace(self, profile=None)

    def arguments(self, load_policy: Callable[[str], Any]) -> dict[str, Any]:
        """The arguments of `plan`, or of `train`, that were given. Raises PlanError.

        ``load_policy`` gives the function that ``FILE.py:FUNCTION`` names.
        """
        from shardwright.clusters import Cluster
        from shardwright.costs import Profile

        if self.mesh is not None and self.policy not in (None, *PARTITIONERS):
            raise PlanError(
                "give either --policy or --mesh, whose axes are policies; only policies that make "
                f"its stages may be given with a mesh: {', '.join(PARTITIONERS)}"
            )
        if self.cluster is not None and self.devices is not None:
            raise PlanError("give either --devices or --cluster, which says how many there are")
        given = self.given()
        if self.mesh is not None:
            given["mesh"] = parse_mesh(self.mesh)
        if self.cluster is not None:
            given["devices"] = Cluster.load(given.pop("cluster"))
        if self.profile is not None:
            given["profile"] = Profile.load(self.profile)
        if self.policy is not None and ":" in self.policy:
            given["policy"] = load_policy(self.policy)
        return given


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions(SplitOptions):
    """All that a plan can be told, training steps included."""

    schedule: Annotated[
        str | None,
        typer.Option(help=f"For a training step: {', '.join(SCHEDULES)}; 1f1b by default."),
    ] = None
    chunks: Annotated[
        int | None, typer.Option(min=1, help="Number of virtual stages per rank.")
    ] = None
    recompute: Annotated[
        str | None, typer.Option(help=f"Activations to recompute: {', '.join(RECOMPUTE)}.")
    ] = None
    memory: Annotated[int | None, typer.Option(help="Bytes per device, for --recompute auto.")] = (
        None
    )
    zero: Annotated[
        int | None, typer.Option(help="1: shard the optimizer state along the axis data.")
    ] = None


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


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicOptions:
    """Which sizes of a model's inputs vary; the arguments of `capture`."""

    dynamic: Annotated[
        str | None,
        typer.Option(
            metavar="INPUT.DIM=SIZE,…",
            help="Sizes that vary: x.0=batch,x.1=length; writes a bundle, a folder.",
        ),
    ] = None
    buckets: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIZE=N,N,…",
            help="Values that a size is padded to; powers of two by default. May be repeated.",
        ),
    ] = None
    sizes: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIZE=N,SIZE=N",
            help="Sizes to build a pipeline for, beside the example's. May be repeated.",
        ),
    ] = None

    def arguments(self) -> dict[str, Any]:
        """The arguments of `capture`; none where no size varies. Raises InputError."""
        if self.dynamic is None:
            if self.buckets or self.sizes:
                raise InputError("--buckets and --sizes are of sizes that vary; give --dynamic")
            return {}
        named: dict[str, dict[int, str]] = {}
        for place, name in _pairs(self.dynamic, "--dynamic", "x.0=batch,x.1=length"):
            tensor, _, dim = place.rpartition(".")
            if not tensor or not dim.isdecimal():
                raise InputError(
                    f"--dynamic names {place!r}; expected an input and a dimension of it, x.0"
                )
            if named.setdefault(tensor, {}).setdefault(int(dim), name) != name:
                raise InputError(f"--dynamic gives {place!r} two names; a dimension has one size")
        buckets = {}
        for text in self.buckets or ():
            name, _, numbers = text.partition("=")
            buckets[name] = tuple(
                _number(n, "--buckets", "batch=1,4,16") for n in numbers.split(",")
            )
        return {"dynamic": named, "buckets": buckets}

    def wanted(self) -> list[dict[str, int]]:
        """The sizes to build pipelines for. Raises InputError."""
        form = "batch=4,length=128"
        return [
            {name: _number(n, "--sizes", form) for name, n in _pairs(text, "--sizes", form)}
            for text in self.sizes or ()
        ]


def _pairs(text: str, option: str, form: str) -> list[tuple[str, str]]:
    """The names and values of ``name=value,name=value``. Raises InputError."""
    pairs = [entry.strip().partition("=") for entry in text.split(",")]
    if wrong := next((name for name, _, value in pairs if not name or not value), None):
        raise InputError(f"{option} {text!r} is wrong at {wrong!r}; expected {form}")
    return [(name, value) for name, _, value in pairs]


def _number(text: str, option: str, form: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise InputError(f"{option} has {text!r}; expected numbers from 1 up, {form}")
    return int(text)
