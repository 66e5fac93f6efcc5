"""What nodes cost, in seconds and bytes: estimated from shapes, or measured."""

from shardwright.profiling.cost import Analytic, Costs, NodeCost

__all__ = ["Analytic", "Costs", "NodeCost"]
