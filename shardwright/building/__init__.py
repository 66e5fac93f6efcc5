"""From a graph and a plan to a pipeline."""

from shardwright.building.build import build

__all__ = [
    "build",
]
