"""What the executor's benchmark found: as a table for the terminal, and as a file of Markdown."""

from __future__ import annotations

import os
import platform
import textwrap
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from rich.table import Table

TOLERANCE = 1e-3
"""Of the largest number: what inductor's and our sums may differ from eager's in float32."""
WORDS = """\
Made by `python -m benchmarks.executor{arguments}` in {minutes} on {machine}, torch {torch}.
Medians of {rounds} rounds, variants in turn, each in a process of its own. *Times ours* is the
median of a variant's time over shardwright's in the same round: above 1 shardwright is faster.
*Start* is what it takes from the model to a step that runs, capture or compilation with it. *Off*
is the largest difference from eager's outputs, or from its first losses, as a part of the largest
number. {floor}"""
FLOOR = """\
*Floor* are the matrix products, convolutions, attention and optimizer alone, by eager's calls."""
HEADINGS = ("variant", "start", "step", "times ours", "off")


class Line(NamedTuple):
    """A variant: seconds from the model to a first step, and of a step; the median of its ratios.

    off
        How far from eager; None where that is not compared.
    """

    variant: str
    start: float
    step: float
    ratio: float
    off: float | None

    @property
    def wrong(self) -> bool:
        """Whether it computes something else than eager; NaN is."""
        return self.off is not None and not self.off <= TOLERANCE

    def cells(self) -> tuple[str, ...]:
        """As it is shown."""
        off = "" if self.off is None else f"{self.off:.0e}{': WRONG' * self.wrong}"
        start, step = f"{self.start:.2f} s", f"{1e3 * self.step:.3f} ms"
        return self.variant, start, step, f"{self.ratio:.2f}", off


def table_of(title: str, lines: Sequence[Line]) -> Table:
    """A workload's lines for the terminal."""
    table = Table(title=title, title_justify="left")
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == HEADINGS[0] else "right")
    for line in lines:
        table.add_row(*line.cells(), style="red" if line.wrong else None)
    return table


def markdown(words: str, found: Mapping[str, Sequence[Line]]) -> str:
    """The file: words, then a table for each workload's title."""
    head = f"| {' | '.join(HEADINGS)} |\n| --- |{' ---: |' * (len(HEADINGS) - 1)}\n"
    parts = ["# The executor against eager and the compilers\n", textwrap.fill(words, 120) + "\n"]
    for title, lines in found.items():
        rows = "".join(f"| {' | '.join(line.cells())} |\n" for line in lines)
        parts += [f"## {title}\n", head + rows]
    return "\n".join(parts)


def words_of(*, arguments: Sequence[str], device: str, seconds: float, rounds: int) -> str:
    """What the file says of how it was made."""
    minutes = max(1, round(seconds / 60))
    return WORDS.format(
        arguments="".join(f" {argument}" for argument in arguments),
        minutes=f"{minutes} minute{'s' * (minutes > 1)}",
        machine=_machine(device),
        torch=torch.__version__.partition("+")[0],
        rounds=rounds,
        floor=FLOOR if device == "cpu" else "",
    ).strip()


def _machine(device: str) -> str:
    cores = f"{os.cpu_count()} cores of an {platform.machine()} machine"
    return cores if device == "cpu" else f"one {torch.cuda.get_device_name()}, with {cores}"
