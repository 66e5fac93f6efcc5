"""Dimension annotations: what an operator's dimensions mean, and how it can be split by them."""

from shardwright.ops.annotation import Annotation
from shardwright.ops.bound import BoundDimop, BoundPart, Carry, Flow
from shardwright.ops.catalog import dimop_of, why_whole
from shardwright.ops.cuts import Cut, even_cuts, even_ranges
from shardwright.ops.dimop import Dimop, Part, Slice
from shardwright.ops.expand import can_expand, expand
from shardwright.ops.infer import infer_annotation
from shardwright.ops.lengths import Inference
from shardwright.ops.register import Registered, register_op, registered

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
