"""How the slots of a mesh hold a tensor, and the cheapest communication from one way to another."""

from shardwright.sharding.convert import Redistribution, RedistributionStep, convert
from shardwright.sharding.layout import Layout, Partial, Placement, Replicate, Shard
from shardwright.sharding.transfer import (
    Crossing,
    SliceAssembly,
    Transfer,
    TransferPiece,
    cross,
    transfer,
)

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
