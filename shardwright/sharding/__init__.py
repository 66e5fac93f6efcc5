"""How the slots of a mesh hold a tensor, and the cheapest communication from one way to another."""

from shardwright.sharding.convert import Redistribution, RedistributionStep, convert
from shardwright.sharding.crossing import Crossing, cross
from shardwright.sharding.layout import Layout
from shardwright.sharding.placement import Partial, Placement, Replicate, Shard
from shardwright.sharding.transfer import SliceAssembly, Transfer, TransferPiece, transfer

__all__ = [
    "Crossing",
    "Layout",
    "Partial",
    "Placement",
    "Redistribution",
    "RedistributionStep",
    "Replicate",
    "Shard",
    "SliceAssembly",
    "Transfer",
    "TransferPiece",
    "convert",
    "cross",
    "transfer",
]
