"""Pipelines and runs as text for a terminal: tables, trees and timelines."""

from shardwright.report.overview import device_table, headline, overview
from shardwright.report.quantities import count_text, seconds_text, tensor_text
from shardwright.report.tables import new_table
from shardwright.report.timeline import TimelineChart, slot_table, task_table

__all__ = [
    "TimelineChart",
    "count_text",
    "device_table",
    "headline",
    "new_table",
    "overview",
    "seconds_text",
    "slot_table",
    "task_table",
    "tensor_text",
]
