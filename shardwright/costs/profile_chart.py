"""A profile as a bar chart: how long each distinct layer takes, and what memory it needs.

Layers stand in the order of the graph, equal ones in one bar that is as long as all of them
together; of many, those that take longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.atomic import replacing
from shardwright.costs.layer import Equals, equals
from shardwright.costs.profile_table import shortened
from shardwright.errors import ProfileError

if TYPE_CHECKING:
    from shardwright.costs.profile import Profile

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
