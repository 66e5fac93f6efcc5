"""Devices and the links between them: cluster files, and models of machines."""

from shardwright.clusters.cluster import Cluster
from shardwright.clusters.device import CPU_CORE, DEVICES, DeviceModel
from shardwright.clusters.links import ETHERNET, GLOO, LINKS, SHARED, Link, Links
from shardwright.clusters.mesh import Mesh

__all__ = [
    "CPU_CORE",
    "DEVICES",
    "ETHERNET",
    "GLOO",
    "LINKS",
    "SHARED",
    "Cluster",
    "DeviceModel",
    "Link",
    "Links",
    "Mesh",
]
