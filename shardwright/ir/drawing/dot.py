"""A picture as Graphviz's text.

Comes in: a `Picture`. Goes out: a digraph in the DOT language. What always holds: names of the
model stand in it only as text, whatever is in them; data flows from top to bottom, but for dashed
edges, which lead from a layer to the next where both are drawn as one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape

from shardwright.ir.drawing.looks import (
    FAINT,
    FONT,
    INK,
    PAPER,
    box_size,
    edge_width,
    tints,
)
from shardwright.ir.drawing.picture import Box, Edge, End, Group, Picture
from shardwright.ir.quantities import MILLISECOND, format_bytes, seconds_text

TYPES = 2
"""How many types of tensors a box names."""
CHARACTERS = 40
"""Longer texts are cut in the middle."""
LEGEND_ROWS = 16
"""Parts in the legend, at most."""


def dot_text(picture: Picture) -> str:
    """The digraph."""
    return "\n".join(_lines(picture)) + "\n"


def _lines(picture: Picture) -> Iterator[str]:
    longest = max((box.milliseconds or 0.0 for box in picture.boxes), default=0.0)
    yield f"digraph {_quoted(picture.name)} {{"
    defaults = {
        "graph": {
            "fontname": FONT,
            "fontsize": 11,
            "fontcolor": INK,
            "bgcolor": PAPER,
            "nodesep": 0.25,
            "ranksep": 0.3,
            "labelloc": "t",
            "labeljust": "l",
            "tooltip": picture.name,
        },
        "node": {"fontname": FONT, "fontsize": 10, "fontcolor": INK, "shape": "box"},
        "edge": {"fontname": FONT, "fontsize": 8, "fontcolor": FAINT, "arrowsize": 0.5},
    }
    for kind, attributes in defaults.items():
        yield f"  {kind} {_attributes(attributes)};"
    yield f"  label=<{_heading(picture)}>;"
    numbers = iter(range(len(picture.groups)))
    for item in picture.items:
        yield from _item(item, longest, numbers, "  ")
    for end in picture.ends:
        yield f"  {end.name} {_end(end)};"
    for edge in picture.edges:
        yield f"  {edge.source} -> {edge.target} {_edge(edge)};"
    yield "}"


# --- boxes and frames -----------------------------------------------------------------------------


def _item(item: Box | Group, longest: float, numbers: Iterator[int], indent: str) -> Iterator[str]:
    if isinstance(item, Box):
        yield f"{indent}{item.name} {_box(item, longest)};"
        return
    yield f"{indent}subgraph cluster_{next(numbers)} {{"
    yield f"{indent}  graph {_frame(item)};"
    yield f"{indent}  label=<{_frame_title(item)}>;"
    for inside in item.items:
        yield from _item(inside, longest, numbers, f"{indent}  ")
    yield f"{indent}}}"


def _box(box: Box, longest: float) -> str:
    colours = tints(box.part)
    width, height = box_size(box.milliseconds, longest)
    attributes = _attributes(
        {
            "style": "rounded,filled" if box.is_module else "filled",
            "fillcolor": colours.box,
            "color": colours.line,
            "penwidth": 1.6 if box.is_module else 0.8,
            "peripheries": 2 if box.count > 1 else 1,
            "width": f"{width:.2f}",
            "height": f"{height:.2f}",
            "margin": "0.08,0.04",
            "tooltip": box.tip,
        }
    )
    return f"{attributes[:-1]}, label=<{'<BR/>'.join(_box_lines(box))}>]"


def _box_lines(box: Box) -> Iterator[str]:
    yield f"<B>{_text(_counted(_cut(box.title), box.count))}</B>"
    if box.path:
        yield _small(_cut(box.path))
    more = " …" if len(box.types) > TYPES else ""
    if box.types:
        yield _small(", ".join(box.types[:TYPES]) + more)
    takes = _takes(box.milliseconds, box.stored)
    if takes:
        yield _small(takes)


def _frame(group: Group) -> str:
    colours = tints(group.part)
    attributes: dict[str, object] = {
        "style": "filled" if group.is_part else "rounded,filled",
        "fillcolor": colours.frame if group.is_part or group.part is None else f"{PAPER}70",
        "color": colours.line,
        "penwidth": 1.2 if group.is_part else 0.7,
        "peripheries": 1,
        "margin": 10,
        "tooltip": group.path or group.title,
    }
    return _attributes(attributes)


def _frame_title(group: Group) -> str:
    times = [box.milliseconds for box in group.boxes if box.milliseconds is not None]
    rest = [_cut(group.path)] if group.path else []
    rest += [_time(sum(times))] if times else []
    title = f"<B>{_text(_counted(_cut(group.title), group.count))}</B>"
    return "  ".join((title, *([_small(", ".join(rest))] if rest else [])))


def _counted(title: str, count: int) -> str:
    return f"{title} ×{count}" if count > 1 else title


def _takes(milliseconds: float | None, stored: int) -> str:
    """``1.5 ms, 7.1 MB stored``; what is nothing is left out."""
    found = [_time(milliseconds)] if milliseconds else []
    return ", ".join([*found, *([f"{format_bytes(stored)} stored"] if stored else [])])


def _time(milliseconds: float) -> str:
    return seconds_text(MILLISECOND * milliseconds)


# --- ends and edges -------------------------------------------------------------------------------


def _end(end: End) -> str:
    attributes = _attributes(
        {
            "shape": "box",
            "style": "rounded,filled",
            "fillcolor": PAPER,
            "color": FAINT,
            "penwidth": 0.8,
            "margin": "0.08,0.04",
            "width": 0.8,
            "height": 0.3,
            "tooltip": "input" if end.is_input else "output",
        }
    )
    return f"{attributes[:-1]}, label=<<I>{_text(_cut(end.title))}</I><BR/>{_small(end.type)}>]"


def _edge(edge: Edge) -> str:
    attributes: dict[str, object] = {
        "label": f" {edge_text(edge.sizes)}",
        "penwidth": f"{edge_width(edge.nbytes):.2f}",
        "color": INK if edge.crosses else "#00000066",
        "tooltip": f"{edge_text(edge.sizes)} from {edge.source} to {edge.target}",
    }
    if edge.crosses:
        attributes["fontcolor"] = INK
    if edge.leads_back:
        attributes |= {"style": "dashed", "constraint": "false"}
    return _attributes(attributes)


def edge_text(sizes: tuple[int, ...]) -> str:
    """The bytes of tensors: ``1.5 MB``, of several equal ones ``12 × 1.5 MB``."""
    if len(sizes) > 1 and len(set(sizes)) == 1:
        return f"{len(sizes)} × {format_bytes(sizes[0])}"
    return format_bytes(sum(sizes))


# --- heading and legend ---------------------------------------------------------------------------


def _heading(picture: Picture) -> str:
    """A table: the name, what sizes mean, and a row a part."""
    boxes = picture.boxes
    timed = any(box.milliseconds is not None for box in boxes)
    operators = sum(len(box.nodes) for box in boxes)
    says = [f"{operators} operator{'s' * (operators != 1)}", "edges by bytes"]
    says += ["boxes by time"] if timed else []
    rows = [f'<TD COLSPAN="2" ALIGN="LEFT"><B>{_text(picture.name)}</B></TD>']
    rows += [_wide(line) for line in (", ".join(says), picture.caption) if line]
    known = picture.parts.known
    rows += [_legend_row(picture, number) for number in known[:LEGEND_ROWS]]
    if len(known) > LEGEND_ROWS:
        rows.append(_wide(f"… {len(known) - LEGEND_ROWS} more"))
    table = "".join(f"<TR>{row}</TR>" for row in rows)
    return f'<TABLE BORDER="0" CELLSPACING="1" CELLPADDING="2">{table}</TABLE>'


def _wide(text: str) -> str:
    return f'<TD COLSPAN="2" ALIGN="LEFT">{_small(text)}</TD>'


def _legend_row(picture: Picture, number: int) -> str:
    """A swatch, and what the part is called, has and takes."""
    own = [box for box in picture.boxes if box.part == number]
    times = [box.milliseconds for box in own if box.milliseconds is not None]
    count = sum(len(box.nodes) for box in own)
    rest = [f"{count} operator{'s' * (count != 1)}", *([_time(sum(times))] if times else [])]
    name = f"{_text(picture.parts.name(number))}  {_small(', '.join(rest))}"
    swatch = f'<TD BGCOLOR="{tints(number).box}" WIDTH="18"> </TD>'
    return f'{swatch}<TD ALIGN="LEFT">{name}</TD>'


# --- text -----------------------------------------------------------------------------------------


def _small(text: str) -> str:
    return f'<FONT POINT-SIZE="8">{_text(text)}</FONT>'


def _text(text: str) -> str:
    """Text for a label of Graphviz's HTML, in which it is nothing but text."""
    return escape(_printable(text)) or " "


def _cut(text: str) -> str:
    """A text without its middle where it is long."""
    kept = CHARACTERS // 2
    return text if len(text) <= CHARACTERS else f"{text[:kept]}…{text[-kept:]}"


def _printable(text: str) -> str:
    """Text with a mark for each character that has no picture."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _quoted(value: object) -> str:
    """A string of the DOT language, lines kept, in which nothing is an escape."""
    lines = (_printable(line) for line in str(value).split("\n"))
    escaped = (line.replace("\\", "\\\\").replace('"', '\\"') for line in lines)
    return '"' + "\\n".join(escaped) + '"'


def _attributes(attributes: Mapping[str, object]) -> str:
    """``[shape="box", width="1.2"]``."""
    return "[" + ", ".join(f"{name}={_quoted(value)}" for name, value in attributes.items()) + "]"
