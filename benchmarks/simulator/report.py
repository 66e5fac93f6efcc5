"""What the simulator's benchmark found: tables for the terminal, and a file of Markdown."""

from __future__ import annotations

import os
import platform
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

import torch
from rich.table import Table

WORDS = """\
Made by `python -m benchmarks.simulator{arguments}` in {minutes} on {machine}, torch {torch}: two
processes of one thread each. Medians of {rounds} rounds. Before the steps of each round and behind
them supertasks are measured alone, and steps are predicted from that by `sw.simulate`: the mean of
both is the prediction. *Off* is how far it is from the measurement."""


class Part(NamedTuple):
    """A table of the file, and what is said below it."""

    title: str
    headings: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    summary: Sequence[str]


def milliseconds(seconds: float) -> str:
    """A time as it is shown."""
    return f"{1e3 * seconds:.0f} ms"


def table_of(part: Part) -> Table:
    """A part for the terminal."""
    table = Table(title=part.title, title_justify="left")
    for heading, cell in zip(part.headings, part.rows[0], strict=True):
        table.add_column(heading, justify="right" if _is_number(cell) else "left")
    for row in part.rows:
        table.add_row(*row)
    return table


def markdown(
    words: str, parts: Sequence[Part], title: str = "The simulator against reality"
) -> str:
    """The file: words, then each part."""
    found = [f"# {title}\n", textwrap.fill(words, 120) + "\n"]
    for part in parts:
        sides = (" ---: |" if _is_number(cell) else " --- |" for cell in part.rows[0])
        lines = [f"| {' | '.join(part.headings)} |", "|" + "".join(sides)]
        lines += [f"| {' | '.join(row)} |" for row in part.rows]
        said = "".join(f"- {line}\n" for line in part.summary)
        found += [f"## {part.title}\n", "\n".join(lines) + "\n", said]
    return "\n".join(found)


def _is_number(cell: str) -> bool:
    return cell[:1] in "+-" or cell[:1].isdigit()


def words_of(*, arguments: Sequence[str], seconds: float, rounds: int) -> str:
    """What the file says of how it was made."""
    minutes = max(1, round(seconds / 60))
    return WORDS.format(
        arguments="".join(f" {argument}" for argument in arguments),
        minutes=f"{minutes} minute{'s' * (minutes > 1)}",
        machine=f"{os.cpu_count()} cores of an {platform.machine()} machine",
        torch=torch.__version__.partition("+")[0],
        rounds=rounds,
    )
