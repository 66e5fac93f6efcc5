"""How the slots of a mesh hold a tensor, and the cheapest communication from one way to another."""

from shardwright.sharding.convert import Conversion, Step, convert
from shardwright.sharding.crossing import Crossing, cross
from shardwright.sharding.layout import Layout
from shardwright.sharding.placement import Partial, Placement, Replicate, Shard
from shardwright.sharding.transfer import Assembly, Piece, Transfer, transfer

__all__ = [
    "Assembly",
    "Conversion",
    "Crossing",
    "Layout",
    "Partial",
    "Piece",
    "Placement",
    "Replicate",
    "Shard",
    "Step",
    "Transfer",
    "convert",
    "cross",
    "transfer",
]
