"""How the slots of a mesh hold a tensor, and the cheapest communication from one way to another."""

from shardwright.layout.cluster import Cluster
from shardwright.layout.convert import Conversion, convert
from shardwright.layout.crossing import Crossing, cross
from shardwright.layout.device import CPU_CORE, DEVICES, DeviceModel
from shardwright.layout.layout import Layout
from shardwright.layout.links import ETHERNET, GLOO, LINKS, SHARED, Link, Links
from shardwright.layout.mesh import Mesh
from shardwright.layout.moves import Step
from shardwright.layout.placement import Partial, Placement, Replicate, Shard
from shardwright.layout.transfer import Assembly, Piece, Transfer, transfer

__all__ = [
    "CPU_CORE",
    "DEVICES",
    "ETHERNET",
    "GLOO",
    "LINKS",
    "SHARED",
    "Assembly",
    "Cluster",
    "Conversion",
    "Crossing",
    "DeviceModel",
    "Layout",
    "Link",
    "Links",
    "Mesh",
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
