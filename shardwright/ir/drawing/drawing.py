"""A drawing of a graph: boxes coloured by partition and sized by time, edges by bytes.

Comes in: a graph, and as plain data the part and the milliseconds of each node. Goes out: a
`Drawing`, whose text is Graphviz's. What always holds: nothing is computed, and the graph stays as
it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.errors import DrawError
from shardwright.ir.drawing.dot import dot_text
from shardwright.ir.drawing.edges import ends_and_edges
from shardwright.ir.drawing.graphviz import check_format, render, write
from shardwright.ir.drawing.outline import outline
from shardwright.ir.drawing.parts import HasStages, Parts, check_times, parts_of
from shardwright.ir.drawing.picture import Picture, boxes_of

if TYPE_CHECKING:
    from shardwright.ir.graph import IRGraph


@dataclass(frozen=True, slots=True)
class Drawing:
    """A picture: ``str`` is its DOT text, notebooks show it as it is."""

    picture: Picture

    def __str__(self) -> str:
        return dot_text(self.picture)

    def svg(self) -> str:
        """The picture as SVG. Raises DrawError where there is no Graphviz."""
        return render(str(self), "svg").decode()

    def save(self, path: str | Path) -> None:
        """Write it as ``.svg``, ``.png``, ``.pdf`` or ``.dot``.

        Raises DrawError for other names, and, but for ``.dot``, where there is no Graphviz;
        WriteError where it cannot be written.
        """
        write(str(self), Path(path))

    def _repr_svg_(self) -> str:
        """What notebooks show."""
        return self.svg()


def draw_graph(
    graph: IRGraph,
    path: str | Path | None = None,
    *,
    partition: Parts | HasStages | Mapping[int, int] | None = None,
    times: Mapping[int, float] | None = None,
    fold: bool = True,
    depth: int | None = None,
    caption: str = "",
) -> Drawing:
    """Draw a graph, and write it where a path is given; `IRGraph.draw` says what arguments mean.

    ``caption`` is a line below the graph's name. Raises DrawError.
    """
    if path is not None:
        check_format(Path(path))
    if depth is not None and (type(depth) is not int or depth < 0):
        raise DrawError(
            f"depth={depth!r}: how far to open modules is a number from 0 up, or None for as far "
            "as the picture stays legible"
        )
    parts = parts_of(graph, partition)
    check_times(graph, times or {})
    items = outline(graph, parts, times or {}, fold=fold, depth=depth)
    ends, edges = ends_and_edges(graph, boxes_of(items))
    drawing = Drawing(Picture(graph.name, caption, parts, items, ends, edges))
    if path is not None:
        drawing.save(path)
    return drawing
