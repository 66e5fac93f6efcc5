"""Drawings of graphs as DOT text, and as images by Graphviz.

Boxes are coloured by their part and sized by their time, edges are as wide as they have bytes,
modules and parts are clusters. `draw` in `drawing` makes them of a graph.
"""

from __future__ import annotations

import math
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import chain, count
from pathlib import Path
from typing import NamedTuple

from shardwright.atomic import replacing
from shardwright.errors import DrawError
from shardwright.ir import IRNode
from shardwright.ir.tensor_meta import MILLISECOND, count_text, format_bytes, seconds_text

FORMATS = ("svg", "png", "pdf", "dot")
SECONDS = 120
"""How long Graphviz may take."""
INK, FAINT, PLAIN = "#222222", "#666666", "#b8b8b8"
COLOURS = ("#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#f0e442", "#0072b2", "#d55e00", "#999999")
"""Of parts: Okabe and Ito's, which the colour-blind tell apart. They begin again after the last."""
FONT = f'fontname="Helvetica,Arial,sans-serif", fontcolor="{INK}"'
HEAD = f"""\
  graph [{FONT}, fontsize=11, bgcolor=white, nodesep=0.25, ranksep=0.3, labelloc=t, labeljust=l];
  node [{FONT}, fontsize=10, shape=box, margin="0.08,0.04"];
  edge [{FONT}, fontsize=8, arrowsize=0.5];"""


@dataclass(frozen=True, slots=True)
class Box:
    """A node, a module, a part, or an end of the graph; ``count`` equal ones in a row.

    It is a frame where it has ``items``. ``lines`` is what a box says below its title.
    """

    name: str
    title: str
    path: str = ""
    count: int = 1
    part: int | None = None
    nodes: tuple[IRNode, ...] = ()
    items: tuple[Box, ...] = ()
    is_module: bool = False
    milliseconds: float | None = None
    lines: tuple[str, ...] = ()
    tip: str = ""

    def __iter__(self) -> Iterator[Box]:
        yield self
        yield from chain.from_iterable(self.items)


class Edge(NamedTuple):
    """The bytes of each tensor that one box makes and another reads.

    It leads back from a layer to the next where both are drawn as one.
    """

    source: str
    target: str
    sizes: tuple[int, ...]
    crosses: bool
    leads_back: bool


@dataclass(frozen=True, slots=True)
class Drawing:
    """A drawn graph: ``str`` returns its DOT text, notebooks show its image."""

    name: str
    caption: str
    parts: Mapping[int, str]
    items: tuple[Box, ...]
    ends: tuple[Box, ...]
    edges: tuple[Edge, ...]

    @property
    def boxes(self) -> list[Box]:
        """All boxes, in order."""
        return [box for box in chain.from_iterable(self.items) if not box.items]

    @property
    def frames(self) -> list[Box]:
        """All frames, outer ones first."""
        return [box for box in chain.from_iterable(self.items) if box.items]

    def __str__(self) -> str:
        return "\n".join(_lines(self)) + "\n"

    def svg(self) -> str:
        """The picture as SVG. Raises DrawError if Graphviz is not installed."""
        return render(str(self), "svg").decode()

    _repr_svg_ = svg

    def save(self, path: str | Path) -> None:
        """Write it as ``.dot``, or through Graphviz as ``.svg``, ``.png`` or ``.pdf``.

        Raises DrawError for other names and without Graphviz, WriteError if it cannot be written.
        """
        form = check_format(path)
        content = str(self).encode() if form == "dot" else render(str(self), form)
        with replacing(Path(path)) as temporary:
            temporary.write_bytes(content)


def check_format(path: str | Path) -> str:
    """The format of a drawing by its file's name. Raises DrawError."""
    form = Path(path).suffix.removeprefix(".").lower()
    if form not in FORMATS:
        known = ", ".join(f".{known}" for known in FORMATS)
        raise DrawError(f"a graph cannot be drawn as {Path(path).name!r}; its name ends in {known}")
    return form


def render(text: str, form: str) -> bytes:
    """The image of DOT text. Raises DrawError without Graphviz, and where it fails."""
    program = shutil.which("dot")
    if program is None:
        raise DrawError(
            f"a .{form} needs Graphviz, whose program dot is not there: install the system's "
            "package graphviz (apt install graphviz, brew install graphviz), or write a .dot file"
        )
    command = [program, f"-T{form}"]
    try:
        done = subprocess.run(command, input=text.encode(), capture_output=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise DrawError(
            f"dot has not finished in {SECONDS} s; draw less with depth=, or write a .dot file"
        ) from None
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip()
        raise DrawError(f"dot failed with status {done.returncode}: {said}")
    return done.stdout


# --- DOT text -------------------------------------------------------------------------------------


def edge_text(sizes: tuple[int, ...]) -> str:
    """The bytes of tensors: ``1.5 MB``, of several equal ones ``12 × 1.5 MB``."""
    if len(sizes) > 1 and len(set(sizes)) == 1:
        return f"{len(sizes)} × {format_bytes(sizes[0])}"
    return format_bytes(sum(sizes))


def colour(part: int | None) -> str:
    """The colour of a part or of none; two more digits make it lighter."""
    return PLAIN if part is None else COLOURS[part % len(COLOURS)]


def box_size(milliseconds: float | None, longest: float) -> tuple[float, float]:
    """Inches: an area for the text, and up to four times that on top, in proportion to the time."""
    share = milliseconds / longest if milliseconds and longest > 0 else 0.0
    side = math.sqrt(1 + 4 * share)
    return 1.7 * side, 0.5 * side


def edge_width(nbytes: int) -> float:
    """Points: thin up to a kilobyte, and as much more for each power of ten above."""
    return 0.6 + 0.8 * max(0.0, math.log10(max(nbytes, 1)) - 3)


def _lines(drawing: Drawing) -> Iterator[str]:
    longest = max((box.milliseconds or 0.0 for box in drawing.boxes), default=0.0)
    yield f"digraph {_quoted(drawing.name)} {{\n{HEAD}\n  label=<{_heading(drawing)}>;"
    clusters = count()
    for item in drawing.items:
        yield from _item_lines(item, longest, clusters, "  ")
    for end in drawing.ends:
        label = f"<I>{_text(end.title)}</I><BR/>{_small(end.lines[0])}"
        yield f"  {end.name} {_attributes(label, style='rounded', color=FAINT)};"
    for edge in drawing.edges:
        looks = {"style": "dashed", "constraint": "false"} if edge.leads_back else {}
        looks["color"] = INK if edge.crosses else f"{INK}66"
        looks["penwidth"] = f"{edge_width(sum(edge.sizes)):.2f}"
        looks["label"] = f" {edge_text(edge.sizes)}"
        yield f"  {edge.source} -> {edge.target} {_attributes(**looks)};"
    yield "}"


def _item_lines(item: Box, longest: float, clusters: Iterator[int], indent: str) -> Iterator[str]:
    own, title = colour(item.part), _text(item.title + f" ×{item.count}" * (item.count > 1))
    looks = {"style": "rounded,filled" if item.is_module else "filled", "color": own}
    if not item.items:
        width, height = (f"{inches:.2f}" for inches in box_size(item.milliseconds, longest))
        looks |= {"fillcolor": f"{own}80", "tooltip": item.tip, "width": width, "height": height}
        looks |= {"peripheries": "2"} if item.count > 1 else {}
        label = "<BR/>".join([f"<B>{title}</B>", *map(_small, item.lines)])
        yield f"{indent}{item.name} {_attributes(label, **looks)};"
        return
    looks["fillcolor"] = "#ffffff70" if item.is_module and item.part is not None else f"{own}20"
    label = f"<B>{title}</B>  {_small(', '.join(filter(None, (item.path, _total(item)))))}"
    yield f"{indent}subgraph cluster_{next(clusters)} {{"
    yield f"{indent}  graph {_attributes(label, **looks)};"
    for inside in item.items:
        yield from _item_lines(inside, longest, clusters, f"{indent}  ")
    yield f"{indent}}}"


def _total(boxes: Iterable[Box]) -> str:
    times = [box.milliseconds for box in boxes if box.milliseconds is not None]
    return seconds_text(MILLISECOND * sum(times)) if times else ""


def _heading(drawing: Drawing) -> str:
    """A table: the name, what sizes mean, and a row with a swatch for each part."""

    def operators(boxes: Sequence[Box]) -> str:
        return count_text(sum(len(box.nodes) for box in boxes), "operator")

    boxes = drawing.boxes
    sized = ["edges by bytes", *(["boxes by time"] if _total(boxes) else [])]
    wide = [f"<B>{_text(drawing.name)}</B>", _small(", ".join([operators(boxes), *sized]))]
    wide += [_small(drawing.caption)] if drawing.caption else []
    rows = [f'<TD COLSPAN="2" ALIGN="LEFT">{line}</TD>' for line in wide]
    for part, name in drawing.parts.items():
        own = [box for box in boxes if box.part == part]
        says = _small(", ".join(filter(None, (operators(own), _total(own)))))
        swatch = f'<TD BGCOLOR="{colour(part)}80" WIDTH="18"> </TD>'
        rows.append(f'{swatch}<TD ALIGN="LEFT">{_text(name)}  {says}</TD>')
    table = "".join(f"<TR>{row}</TR>" for row in rows)
    return f'<TABLE BORDER="0" CELLSPACING="1" CELLPADDING="2">{table}</TABLE>'


def _small(text: str) -> str:
    return f'<FONT POINT-SIZE="8">{_text(text)}</FONT>'


def _text(text: str) -> str:
    """Text for a label of Graphviz's HTML, in which it is nothing but text."""
    return escape(_printable(text)) or " "


def _quoted(text: str) -> str:
    """A string of the DOT language, in which nothing is an escape."""
    return '"' + _printable(text).replace("\\", "\\\\").replace('"', '\\"') + '"'


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _attributes(html: str = "", **attributes: str) -> str:
    """``[color="#222222", label=<text>]``."""
    found = [f"{name}={_quoted(value)}" for name, value in attributes.items()]
    return f"[{', '.join([*found, *([f'label=<{html}>'] if html else [])])}]"
