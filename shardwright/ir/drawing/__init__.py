"""Pictures of graphs: what is drawn, as Graphviz's text, and as an SVG."""

from shardwright.ir.drawing.drawing import Drawing, draw_graph
from shardwright.ir.drawing.graphviz import check_format
from shardwright.ir.drawing.parts import HasStages, Parts

__all__ = ["Drawing", "HasStages", "Parts", "check_format", "draw_graph"]
