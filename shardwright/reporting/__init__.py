"""Pipelines and runs as text for a terminal, and pictures of graphs."""

from shardwright.ir.tensor_meta import count_text, seconds_text
from shardwright.reporting.chart import TimelineChart
from shardwright.reporting.dot import Drawing
from shardwright.reporting.drawing import draw
from shardwright.reporting.overview import device_table, headline, overview
from shardwright.reporting.tables import (
    new_table,
    simulated_memory_table,
    simulation_table,
    slot_table,
    task_table,
)

__all__ = [
    "Drawing",
    "TimelineChart",
    "count_text",
    "device_table",
    "draw",
    "headline",
    "new_table",
    "overview",
    "seconds_text",
    "simulated_memory_table",
    "simulation_table",
    "slot_table",
    "task_table",
]
