"""From a graph and a plan to a pipeline."""

from shardwright.transform.build import build

__all__ = ["build"]
