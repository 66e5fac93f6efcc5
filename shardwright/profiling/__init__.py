"""Measuring what layers, links and devices take on the machine at hand."""

from typing import TYPE_CHECKING

from shardwright.lazy import import_lazily

if TYPE_CHECKING:
    from shardwright.profiling.machine import profile_cluster, profile_device, profile_links
    from shardwright.profiling.profiler import profile, profile_network

__all__ = [
    "profile",
    "profile_cluster",
    "profile_device",
    "profile_links",
    "profile_network",
]

import_lazily(__name__)
