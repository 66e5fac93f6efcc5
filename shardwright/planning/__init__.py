"""Plans: which device runs which node."""

from shardwright.planning.pipeline import plan
from shardwright.planning.plan import Plan, Stage, TableSplit

__all__ = ["Plan", "Stage", "TableSplit", "plan"]
