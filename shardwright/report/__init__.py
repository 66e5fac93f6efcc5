"""Pipelines and runs as text for a terminal: tables, trees and timelines."""

from shardwright.report.overview import device_table, headline, overview
from shardwright.report.quantities import bytes_text, count_text, seconds_text, tensor_text

__all__ = [
    "bytes_text",
    "count_text",
    "device_table",
    "headline",
    "overview",
    "seconds_text",
    "tensor_text",
]
