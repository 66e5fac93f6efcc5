"""How a picture looks: colours of parts, sizes by time, widths by bytes.

Colours are those of Okabe and Ito, which people who see colours differently tell apart too; from
the ninth part on they begin again, and the parts' names tell them apart. What always holds: more
time never makes a smaller box, more bytes never a thinner edge.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

FONT = "Helvetica,Arial,sans-serif"
INK, FAINT = "#222222", "#666666"
PAPER = "#ffffff"
COLOURS = (
    "#56b4e9",  # sky blue
    "#e69f00",  # orange
    "#009e73",  # green
    "#cc79a7",  # purple
    "#f0e442",  # yellow
    "#0072b2",  # blue
    "#d55e00",  # vermilion
    "#999999",  # grey
)
PLAIN = "#b8b8b8"
"""The colour of what is in no part."""

WIDTH, HEIGHT = 1.7, 0.5
"""Inches of a box that takes no time, which holds its text."""
GROWTH = 4.0
"""How many times that area the box has on top that takes longest."""
THIN, STEP = 0.6, 0.8
"""Points of an edge of up to a kilobyte, and how many more for each power of ten above."""


@dataclass(frozen=True, slots=True)
class Tints:
    """The colours of one part: its boxes, the frame around them, and lines."""

    box: str
    frame: str
    line: str


def tints(part: int | None) -> Tints:
    """The colours of a part, or of what is in none."""
    colour = PLAIN if part is None else COLOURS[part % len(COLOURS)]
    return Tints(mixed(colour, PAPER, 0.5), mixed(colour, PAPER, 0.87), mixed(colour, INK, 0.35))


def mixed(colour: str, other: str, share: float) -> str:
    """A colour with a share of another one in it."""
    pairs = zip(_channels(colour), _channels(other), strict=True)
    return "#" + "".join(f"{round(a + share * (b - a)):02x}" for a, b in pairs)


def _channels(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))


def box_size(milliseconds: float | None, longest: float) -> tuple[float, float]:
    """Width and height in inches: an area for the text, and one on top in proportion to the time.

    Graphviz makes a box wider where its text needs that.
    """
    share = milliseconds / longest if milliseconds and longest > 0 else 0.0
    side = math.sqrt(1 + GROWTH * share)
    return WIDTH * side, HEIGHT * side


def edge_width(nbytes: int) -> float:
    """Points, by the logarithm of the bytes."""
    return THIN + STEP * max(0.0, math.log10(max(nbytes, 1)) - 3)
