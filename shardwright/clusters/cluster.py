"""The machines that a plan is for: which device slots there are, and what links them.

Input: the device slots of each host, what a slot is, and what links them inside a host and
between hosts. Output: the links among any slots, and along the axes of a mesh on them. Slots of
one host are processes that share memory, as the runtime has them, unless it is said otherwise. An
axis is as slow as its slowest group: a group that spans hosts pays the links between hosts for
every message.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import msgspec

from shardwright.atomic import read_whole, replacing
from shardwright.clusters.cluster_file import Machines, named_slots, read_machines, write_machines
from shardwright.clusters.device import CPU_CORE, DeviceModel
from shardwright.clusters.links import ETHERNET, GLOO, SHARED, Link, Links
from shardwright.clusters.mesh import Group, Mesh
from shardwright.errors import PlanError

__all__ = ["ETHERNET", "GLOO", "SHARED", "Cluster", "DeviceModel", "Link", "Links"]


class Cluster(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Machines of a cluster. ``hosts`` lists the devices of each host.

    ``inside`` links devices of one host, ``between`` those of two hosts. All devices are of the
    model ``device``.
    """

    hosts: tuple[Group, ...]
    inside: Links = SHARED
    between: Links = ETHERNET
    device: DeviceModel = CPU_CORE

    def __post_init__(self) -> None:
        devices = self.devices
        if len(set(devices)) < len(devices):
            twice = next(device for device in devices if devices.count(device) > 1)
            raise PlanError(f"a cluster names the device slot {twice!r} twice")

    @classmethod
    def of(
        cls,
        devices: int,
        devices_per_host: int | None = None,
        *,
        device: DeviceModel = CPU_CORE,
        inside: Links = SHARED,
        between: Links = ETHERNET,
    ) -> Cluster:
        """Devices d0, d1, … on hosts of equal size; on one host if that size is None."""
        per_host = devices if devices_per_host is None else devices_per_host
        if devices < 1 or per_host < 1:
            raise PlanError(
                f"a cluster has 1 device or more, and 1 a host, found {devices} and {per_host}"
            )
        return cls(named_slots(devices, per_host), inside, between, device)

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Read a cluster file (format: `cluster_file`).

        Raises PlanError, which names the file, or its line and key.
        """
        try:
            text = read_whole(Path(path)).decode("utf-8")
        except OSError as error:
            reason = error.strerror or error
            raise PlanError(f"no cluster can be read from {path}: {reason}") from None
        except UnicodeDecodeError as error:
            raise PlanError(f"{path} is no text in UTF-8: {error}") from None
        hosts, device, inside, between = read_machines(text, str(path))
        try:
            return cls(hosts, inside or SHARED, between or ETHERNET, device)
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from None

    def save(self, path: str | Path) -> None:
        """Write a cluster file, completely or not at all."""
        with replacing(Path(path)) as temporary:
            temporary.write_text(self.to_yaml(), "utf-8")

    def to_yaml(self) -> str:
        """The text of the cluster's file; links that no slots need and nobody gave are left out."""
        alone = len(self.hosts) == 1 and self.between == ETHERNET
        apart = all(len(host) == 1 for host in self.hosts) and self.inside == SHARED
        return write_machines(
            Machines(
                self.hosts,
                self.device,
                inside=None if apart else self.inside,
                between=None if alone else self.between,
            )
        )

    @property
    def devices(self) -> tuple[str, ...]:
        """All devices, host by host."""
        return tuple(device for host in self.hosts for device in host)

    def among(self, group: Group) -> Links:
        """What links these slots to one another; PlanError where the cluster lacks one."""
        hosts = _hosts(self)
        for device in group:
            if device not in hosts:
                raise PlanError(
                    f"the cluster has no device slot {device!r}; it has {', '.join(self.devices)}"
                )
        return self.inside if len({hosts[device] for device in group}) == 1 else self.between

    def links(self, mesh: Mesh) -> tuple[Links, ...]:
        """The slowest links of the groups along each axis of a mesh."""
        return _links(self, mesh)


@lru_cache(maxsize=64)
def _hosts(cluster: Cluster) -> dict[str, int]:
    """The host of each slot."""
    return {device: i for i, host in enumerate(cluster.hosts) for device in host}


@lru_cache(maxsize=1024)
def _links(cluster: Cluster, mesh: Mesh) -> tuple[Links, ...]:
    """The slowest of the links of an axis's groups."""
    found = []
    for axis in range(mesh.ndim):
        every = [cluster.among(group) for group in mesh.groups(axis)]
        found.append(cluster.between if cluster.between in every else cluster.inside)
    return tuple(found)
