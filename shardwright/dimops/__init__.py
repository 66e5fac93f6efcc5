"""Dimension annotations: what an operator's dimensions mean, and how it can be split by them."""

from shardwright.dimops.bound import BoundDimop, BoundPart, Carry, Flow
from shardwright.dimops.catalog import dimop_of
from shardwright.dimops.cuts import Cut, even_cuts, even_ranges
from shardwright.dimops.dimop import Dimop, Inference, Part, Slice

__all__ = [
    "BoundDimop",
    "BoundPart",
    "Carry",
    "Cut",
    "Dimop",
    "Flow",
    "Inference",
    "Part",
    "Slice",
    "dimop_of",
    "even_cuts",
    "even_ranges",
]
