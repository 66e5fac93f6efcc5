"""Pipelines and runs as text for a terminal, and pictures of graphs."""

from shardwright.ir.quantities import count_text, seconds_text
from shardwright.report.chart import TimelineChart
from shardwright.report.drawing import draw
from shardwright.report.durations import slot_table, task_table
from shardwright.report.overview import device_table, headline, overview
from shardwright.report.simulated import simulated_memory_table, simulation_table
from shardwright.report.tables import new_table

__all__ = [
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
