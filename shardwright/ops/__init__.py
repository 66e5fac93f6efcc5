"""Dimension annotations: what an operator's dimensions mean, and how it can be split by them."""

from shardwright.ops.annotation import Annotation
from shardwright.ops.bound import BoundDimop, BoundPart, Carry, Flow
from shardwright.ops.catalog import dimop_of, why_whole
from shardwright.ops.dimop import (
    Cut,
    Dimop,
    InferredDimop,
    OperatorPart,
    Slice,
    even_cuts,
)
from shardwright.ops.discover import infer_annotation
from shardwright.ops.register import Registered, register_op, registered

__all__ = [
    "Annotation",
    "BoundDimop",
    "BoundPart",
    "Carry",
    "Cut",
    "Dimop",
    "Flow",
    "InferredDimop",
    "OperatorPart",
    "Registered",
    "Slice",
    "dimop_of",
    "even_cuts",
    "infer_annotation",
    "register_op",
    "registered",
    "why_whole",
]
