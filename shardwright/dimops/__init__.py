"""Dimension annotations: what an operator's dimensions mean, and how it can be split by them."""

from shardwright.dimops.annotation import Annotation
from shardwright.dimops.bound import BoundDimop, BoundPart, Carry, Flow
from shardwright.dimops.catalog import dimop_of, why_whole
from shardwright.dimops.cuts import Cut, even_cuts, even_ranges
from shardwright.dimops.dimop import Dimop, Part, Slice
from shardwright.dimops.expand import can_expand, expand
from shardwright.dimops.infer import infer_annotation
from shardwright.dimops.lengths import Inference
from shardwright.dimops.register import Registered, register_op, registered

__all__ = [
    "Annotation",
    "BoundDimop",
    "BoundPart",
    "Carry",
    "Cut",
    "Dimop",
    "Flow",
    "Inference",
    "Part",
    "Registered",
    "Slice",
    "can_expand",
    "dimop_of",
    "even_cuts",
    "even_ranges",
    "expand",
    "infer_annotation",
    "register_op",
    "registered",
    "why_whole",
]
