"""A profile as text: a line for each distinct layer.

profile of GPT: 51 layers, 12 of them distinct
Intel(R) Xeon(R) Processor, 1 thread, torch 2.13.0

layer           kind                    ×  forward  backward  forward  …
                                                ms        ms       MB  …
embed           aten.embedding.default  1    0.021     0.134     0.26  …
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardwright.costs.layer import Equals, equals

if TYPE_CHECKING:
    from shardwright.costs.profile import Profile

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
