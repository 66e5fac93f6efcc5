"""What each layer of a program takes, as it was measured.

Input: what `profile` measured. Output: a `Profile`, which prints as a table (a line for each
distinct layer), is drawn as a chart, is a file, and is what planners take for measured costs.
Invariant: layers stand in the order of the graph, their nodes are all its forward nodes, each once;
equal layers share one measurement. A file is there whole or not at all; what does not read is one
ProfileError that names the file, what was found and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from shardwright.atomic import read_whole, replacing
from shardwright.clusters import CPU_CORE, DEVICES, DeviceModel
from shardwright.costs.cost import Analytic, Costs, Measured
from shardwright.costs.fit import FitPoint, fit
from shardwright.costs.measurement import Measurement
from shardwright.errors import ProfileError

S = TypeVar("S", bound=msgspec.Struct)


def write_stored(path: str | Path, content: msgspec.Struct) -> None:
    """Write it. Raises WriteError."""
    text = msgspec.json.format(msgspec.json.encode(content), indent=1)
    with replacing(Path(path)) as temporary:
        temporary.write_bytes(text + b"\n")


def read_stored(path: str | Path, kind: type[S], what: str, writer: str) -> S:
    """The ``kind`` in a file. Raises ProfileError, which says ``what`` is missing.

    ``writer`` is what writes such a file.
    """
    try:
        return msgspec.json.decode(read_whole(Path(path)), type=kind)
    except OSError as error:
        reason = error.strerror or error
        raise ProfileError(f"no {what} can be read from {path}: {reason}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProfileError(
            f"{path} is no {what}, or one of another version: {error}; write it with {writer}"
        ) from None


# --- layers ---------------------------------------------------------------------------------------


MEGABYTE = 1e6
"""Bytes."""


class Layer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node or a block of nodes, run alone (seed 001, Model Profiling).

    name
        The module's path, or the name of what the node makes.
    kind
        The module's class, or the operator.
    nodes
        Ids of the nodes, in the order of the graph.
    measurement
        Which measurement of the profile the numbers are from; equal layers share it.
    forward_time, backward_time
        Milliseconds, medians after warm-up. The backward gives the gradients of parameters and of
        what nodes made; where it recomputes, the forward counts in it again.
    memory_forward, memory_backward
        MB (1e6 bytes) that a run needs at most, beyond its inputs and parameters; of the backward,
        beyond what its forward has left.
    layer_size, input_size, output_size
        MB of the stored tensors that the layer reads, of its other inputs, and of its outputs.
    """

    name: str
    kind: str
    nodes: tuple[int, ...]
    measurement: str
    forward_time: float
    backward_time: float
    memory_forward: float
    memory_backward: float
    layer_size: float
    input_size: float
    output_size: float

    @property
    def cuda_memory_forward(self) -> float:
        """`memory_forward`, under the seed's name."""
        return self.memory_forward

    @property
    def cuda_memory_backward(self) -> float:
        """`memory_backward`, under the seed's name."""
        return self.memory_backward


@dataclass(frozen=True, slots=True)
class Equals:
    """Layers that share one measurement: the first, and how many there are."""

    first: Layer
    count: int

    @property
    def name(self) -> str:
        """The first one's name, with dots where there are more."""
        return self.first.name if self.count == 1 else f"{self.first.name} …"


def equals(layers: Iterable[Layer]) -> list[Equals]:
    """Layers by measurement, in the order of the first of each."""
    found: dict[str, list[Layer]] = {}
    for layer in layers:
        found.setdefault(layer.measurement, []).append(layer)
    return [Equals(same[0], len(same)) for same in found.values()]


# --- the profile ----------------------------------------------------------------------------------


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measured time and memory of each layer of a graph on one device.

    graph
        The graph's name.
    device, kind
        The device's own name of its model; ``cpu`` or ``cuda``.
    torch_version, threads
        Version of torch and number of threads during measurement.
    recompute
        Whether the backward runs the forward again instead of keeping saved tensors.
    layers
        In the order of the graph.
    measurements
        The measurements of each distinct layer, by key.
    """

    graph: str
    device: str
    kind: Literal["cpu", "cuda"]
    torch_version: str
    threads: int
    recompute: bool
    layers: tuple[Layer, ...]
    measurements: dict[str, Measurement]

    def __str__(self) -> str:
        """A table with a line for each distinct layer."""
        return format_profile(self)

    @property
    def forward_time(self) -> float:
        """Milliseconds of the forwards of all layers, one after another."""
        return sum(layer.forward_time for layer in self.layers)

    @property
    def backward_time(self) -> float:
        """Milliseconds of the backwards of all layers, one after another."""
        return sum(layer.backward_time for layer in self.layers)

    def costs(self, fallback: Costs | None = None) -> Measured:
        """What nodes cost, as they were measured here; see `Measured`.

        ``fallback`` says what was not measured, up to a factor for each operator; by default it is
        the roofline of `device_model`.
        """
        return Measured(self.measurements.values(), fallback or Analytic(self.device_model()))

    def device_model(self) -> DeviceModel:
        """A device of this kind, with the rates that explain best what single nodes took.

        Its memory is not measured.
        """
        named = msgspec.structs.replace(_DEVICES[self.kind], name=self.device)
        found = [pair for each in self.measurements.values() for pair in each.observations()]
        return fit(named, [FitPoint(*pair) for pair in found])

    def save(self, path: str | Path) -> None:
        """Write it as JSON. Raises OSError as writing does."""
        write_stored(path, _ProfileFile(1, self))

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read what `save` wrote. Raises ProfileError."""
        writer = "Profile.save or shardwright profile -o"
        return read_stored(path, _ProfileFile, "profile", writer).profile

    def plot(self, path: str | Path) -> None:
        """Draw a bar chart of times and memory, as ``.svg``, ``.png`` or ``.pdf``.

        Raises ProfileError for other names, and where matplotlib is not installed.
        """
        plot_profile(self, Path(path))


class _ProfileFile(msgspec.Struct, forbid_unknown_fields=True):
    """A profile in a file."""

    version: Literal[1]
    profile: Profile


_DEVICES: Mapping[str, DeviceModel] = {"cpu": CPU_CORE, "cuda": DEVICES["A100-80GB"]}
"""Where the search for a device's rates begins."""


# --- a profile as a table -------------------------------------------------------------------------


LONGEST_NAME = 44
"""Characters of a name; longer ones lose their beginning."""

_COLUMNS: dict[str, tuple[str, str, str]] = {
    "forward_time": ("forward", "time", "ms"),
    "backward_time": ("backward", "time", "ms"),
    "memory_forward": ("forward", "memory", "MB"),
    "memory_backward": ("backward", "memory", "MB"),
    "layer_size": ("layer", "size", "MB"),
    "input_size": ("input", "size", "MB"),
    "output_size": ("output", "size", "MB"),
}
"""Fields of a layer, and what stands above their numbers."""
_TEXTS = 2
"""Columns of text, which stand left."""


def format_profile(profile: Profile) -> str:
    """The table of a profile, and above it what it is of."""
    lines = equals(profile.layers)
    headings = [["layer", "kind", "×"], [""] * 3, [""] * 3]
    for heading, texts in zip(headings, zip(*_COLUMNS.values(), strict=True), strict=True):
        heading += texts
    total = ["all", "", str(len(profile.layers))]
    total += [f"{seconds:.4g}" for seconds in (profile.forward_time, profile.backward_time)]
    total += [""] * (len(_COLUMNS) - 2)
    rows = [_row(line) for line in lines]
    return "\n".join((*_title(profile, len(lines)), "", *_aligned([*headings, *rows, total])))


def number_text(number: float) -> str:
    """A number of ms or MB with three digits."""
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def _title(profile: Profile, distinct: int) -> tuple[str, str]:
    count, threads = len(profile.layers), profile.threads
    again = ", backward with recomputation" if profile.recompute else ""
    return (
        f"profile of {profile.graph}: {_count(count, 'layer')}, {distinct} of them distinct{again}",
        f"{profile.device}, {_count(threads, 'thread')}, torch {profile.torch_version}",
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _row(line: Equals) -> list[str]:
    numbers = [number_text(getattr(line.first, field)) for field in _COLUMNS]
    return [shortened(line.name), line.first.kind, str(line.count), *numbers]


def shortened(name: str) -> str:
    """A name of at most `LONGEST_NAME` characters."""
    return name if len(name) <= LONGEST_NAME else f"…{name[1 - LONGEST_NAME :]}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(_cells(row, widths)).rstrip() for row in rows]


def _cells(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [
        cell.ljust(width) if i < _TEXTS else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]


# --- a profile as a chart -------------------------------------------------------------------------


FORMATS = ("svg", "png", "pdf")
ROWS = 32
"""Bars, at most."""
_FORWARD, _BACKWARD = "#4878a8", "#e0904c"


def chart_format(path: Path) -> str:
    """The format of a chart by its file's name. Raises ProfileError."""
    form = path.suffix.removeprefix(".").lower()
    if form not in FORMATS:
        raise ProfileError(
            f"a chart cannot be written as {path.name!r}; its name ends in "
            f"{', '.join(f'.{known}' for known in FORMATS)}"
        )
    return form


def plot_profile(profile: Profile, path: Path) -> None:
    """Draw a profile to a file. Raises ProfileError."""
    form = chart_format(path)
    figure = _figure(profile)
    with replacing(path) as temporary:
        figure.savefig(temporary, format=form, dpi=150)


def _figure(profile: Profile) -> Any:
    """The chart: times to the left, memory to the right."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ProfileError(
            "matplotlib, which draws charts, is not installed: pip install matplotlib"
        ) from None
    lines = _longest(equals(profile.layers))
    figure = Figure(figsize=(11, 1.6 + 0.3 * len(lines)), layout="constrained")
    times, memory = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    _draw_times(times, lines)
    _draw_memory(memory, lines)
    again = ", backward with recomputation" if profile.recompute else ""
    figure.suptitle(f"{profile.graph} on {profile.device}{again}", fontsize=11)
    return figure


def _draw_times(axes: Any, lines: Sequence[Equals]) -> None:
    """A bar a line, the backward behind the forward."""
    forward = [line.count * line.first.forward_time for line in lines]
    backward = [line.count * line.first.backward_time for line in lines]
    places = range(len(lines))
    axes.barh(places, forward, color=_FORWARD, label="forward")
    axes.barh(places, backward, left=forward, color=_BACKWARD, label="backward")
    axes.set_yticks(places, [_label(line) for line in lines], fontsize=8)
    axes.invert_yaxis()
    axes.legend(loc="best", frameon=False, fontsize=9)
    _dress(axes, "time", "ms, of all equal layers together")


def _draw_memory(axes: Any, lines: Sequence[Equals]) -> None:
    """Two bars a line: the forward's above the backward's."""
    forward = [line.first.memory_forward for line in lines]
    backward = [line.first.memory_backward for line in lines]
    above, below = ([i + shift for i in range(len(lines))] for shift in (-0.2, 0.2))
    axes.barh(above, forward, height=0.4, color=_FORWARD)
    axes.barh(below, backward, height=0.4, color=_BACKWARD)
    _dress(axes, "memory at most", "MB, of one layer")


def _dress(axes: Any, title: str, unit: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(unit)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _longest(lines: Sequence[Equals]) -> list[Equals]:
    """The lines that take longest, in their order."""

    def seconds(line: Equals) -> float:
        return line.count * (line.first.forward_time + line.first.backward_time)

    kept = sorted(range(len(lines)), key=lambda i: -seconds(lines[i]))[:ROWS]
    return [lines[i] for i in sorted(kept)]


def _label(line: Equals) -> str:
    name = shortened(line.name)
    kind = line.first.kind.removeprefix("aten.").removesuffix(".default")
    shown = name if name.startswith(kind) else f"{name} ({kind})"
    return f"{shown} ×{line.count}" if line.count > 1 else shown
