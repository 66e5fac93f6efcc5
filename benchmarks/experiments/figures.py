"""Tables and plots of runs: throughput, memory, accuracy.

Comes in: runs. Goes out, for each subject: a table as Markdown, and a figure with a panel a
program. Everything is compared with the ordinary PyTorch loop or with one device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from benchmarks.experiments.measurements import PYTORCH, Run

MEGA = 1e6
COLORS = {1: "#7f7f7f", 2: "#1f77b4", 4: "#ff7f0e"}
"""By the number of devices."""
Runs = Sequence[Run]


@dataclass(frozen=True)
class Subject:
    """What is told of runs: a row of a table for each, and a panel for those of one program."""

    heading: tuple[str, ...]
    row: Callable[[Run, Runs], tuple[str, ...]]
    panel: Callable[[Axes, Runs], None]


def markdown(subject: Subject, runs: Runs) -> str:
    """The table of a subject."""
    rows = [
        (run.program, run.way, str(run.devices), *subject.row(run, of_program(runs, run.program)))
        for run in runs
    ]
    heading = ("program", "way", "devices", *subject.heading)
    lines = [heading, ("---",) * len(heading), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def figure(subject: Subject, runs: Runs) -> Figure:
    """The plot of a subject."""
    programs = list(dict.fromkeys(run.program for run in runs))
    drawn = Figure(figsize=(4.6 * len(programs), 4.4), layout="constrained")
    panels = drawn.subplots(1, len(programs), squeeze=False)[0]
    for panel, program in zip(panels, programs, strict=True):
        panel.set_title(program)
        subject.panel(panel, of_program(runs, program))
        panel.spines[["top", "right"]].set_visible(False)
    return drawn


def of_program(runs: Runs, program: str) -> list[Run]:
    """The runs of one program."""
    return [run for run in runs if run.program == program]


def _pytorch(runs: Runs) -> Run:
    return next(run for run in runs if run.way == PYTORCH)


# --- throughput ---------------------------------------------------------------------------------


def _throughput_row(run: Run, runs: Runs) -> tuple[str, ...]:
    return f"{run.speed:,.0f} {run.noun}/s", f"{run.speed / _pytorch(runs).speed:.2f}"


def _throughput_panel(panel: Axes, runs: Runs) -> None:
    _bars(panel, runs, [run.speed for run in runs])
    panel.axvline(_pytorch(runs).speed, color="black", linewidth=0.8, linestyle=":")
    panel.set_xlabel(f"{runs[0].noun} a second")


# --- memory -------------------------------------------------------------------------------------


def _memory_row(run: Run, runs: Runs) -> tuple[str, ...]:
    if run.stored is None:
        return "", ""
    one = next(found.stored for found in runs if found.devices == 1 and found.stored)
    return f"{run.stored / MEGA:.2f} MB", f"{run.stored / one:.2f}"


def _memory_panel(panel: Axes, runs: Runs) -> None:
    counted = [run for run in runs if run.stored is not None]
    _bars(panel, counted, [(run.stored or 0) / MEGA for run in counted])
    panel.set_xlabel("MB kept on the fullest device")


def _bars(panel: Axes, runs: Runs, lengths: Sequence[float]) -> None:
    bars = panel.barh(
        [run.way for run in runs], lengths, color=[COLORS[run.devices] for run in runs]
    )
    digits = 0 if max(lengths) > 100 else 2
    panel.bar_label(bars, fmt=f"{{:,.{digits}f}}", padding=3, fontsize=8)
    panel.margins(x=0.18)
    panel.invert_yaxis()


# --- accuracy -----------------------------------------------------------------------------------


def _accuracy_row(run: Run, runs: Runs) -> tuple[str, ...]:
    pairs = zip(run.losses, _pytorch(runs).losses, strict=True)
    error = max(abs(found - expected) / abs(expected) for found, expected in pairs)
    return f"{run.accuracy:.4f}", f"{run.losses[-1]:.6f}", f"{error:.0e}"


def _accuracy_panel(panel: Axes, runs: Runs) -> None:
    for run in runs:
        plain = run.way == PYTORCH
        panel.plot(
            range(1, len(run.losses) + 1),
            run.losses,
            label=f"{run.way}: {run.accuracy:.3f}",
            linewidth=4 if plain else 0.9,
            color="lightgray" if plain else None,
        )
    panel.set_yscale("log")
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    panel.yaxis.set_major_formatter("{x:g}")
    panel.yaxis.set_minor_formatter(NullFormatter())
    panel.set_xlabel("step")
    panel.set_ylabel("loss")
    panel.legend(title="accuracy on what is held out", fontsize=7, title_fontsize=7)


SUBJECTS = {
    "throughput": Subject(("throughput", "of PyTorch's"), _throughput_row, _throughput_panel),
    "memory": Subject(
        ("kept on the fullest device", "of one device's"),
        _memory_row,
        _memory_panel,
    ),
    "accuracy": Subject(
        ("accuracy", "last loss", "largest difference from PyTorch's losses"),
        _accuracy_row,
        _accuracy_panel,
    ),
}
