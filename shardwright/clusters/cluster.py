"""The machines that a plan is for: which device slots there are, and what links them.

Input: the device slots of each host, what a slot is, and what links them inside a host and
between hosts. Output: the links among any slots, and along the axes of a mesh on them. Slots of
one host are processes that share memory, as the runtime has them, unless it is said otherwise. An
axis is as slow as its slowest group: a group that spans hosts pays the links between hosts for
every message.

A cluster is a file in YAML:

    hosts: 4                    or lists of names: [[a0, a1], [b0, b1]]
    devices_per_host: 8         with a number of hosts
    links:
      inside: nvlink3           a name in LINKS, or
      between: {latency: 5 us, bandwidth: 25 GB/s}
    device: A100-80GB           a name in DEVICES, or the fields of a DeviceModel:
    # {name: mine, kind: cuda, memory: 80 GB, flops: 16 TFLOP/s, half_flops: 250 TFLOP/s,
    #  bandwidth: 1.7 TB/s, overhead: 5 us}

Links may tell kinds of communication apart: ``start`` of a collective, ``send`` and ``collective``,
or any of `KINDS` by its name, each with a latency and a bandwidth; those in `OPTIONAL` only by
name, else they are not known. Invariant: what is written is read as the same; links that the slots
need are never made up.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args

import msgspec
import yaml

from shardwright.atomic import read_whole, replacing
from shardwright.clusters.device import CPU_CORE, DEVICES, FIGURES, DeviceModel
from shardwright.clusters.links import (
    COLLECTIVES,
    ETHERNET,
    GLOO,
    KINDS,
    LINKS,
    OPTIONAL,
    SHARED,
    Link,
    Links,
)
from shardwright.clusters.mesh import Group, Mesh
from shardwright.clusters.units import Quantity, parsed, written
from shardwright.devices import DeviceKind
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
        """Read a cluster file.

        Raises PlanError, which names the file, or its line and key.
        """
        try:
            text = read_whole(Path(path)).decode("utf-8")
        except OSError as error:
            reason = error.strerror or error
            raise PlanError(f"no cluster can be read from {path}: {reason}") from None
        except UnicodeDecodeError as error:
            raise PlanError(f"{path} is no text in UTF-8: {error}") from None
        return read_cluster(text, str(path))

    def save(self, path: str | Path) -> None:
        """Write a cluster file, completely or not at all."""
        with replacing(Path(path)) as temporary:
            temporary.write_text(self.to_yaml(), "utf-8")

    def to_yaml(self) -> str:
        """The text of the cluster's file; links that no slots need and nobody gave are left out."""
        alone = len(self.hosts) == 1 and self.between == ETHERNET
        apart = all(len(host) == 1 for host in self.hosts) and self.inside == SHARED
        needed = {"inside": not apart, "between": not alone}
        links = {name: _written_links(getattr(self, name)) for name in needed if needed[name]}
        hosts = _written_hosts(self.hosts)
        return "".join(
            (
                _yaml(hosts, inline="devices_per_host" not in hosts),
                _yaml({"links": links}) if links else "",
                _yaml({"device": _written_device(self.device)}, inline=False),
            )
        )

    def __repr__(self) -> str:
        hosts, slots = len(self.hosts), len(self.devices)
        return f"Cluster(hosts={hosts}, slots={slots}, device={self.device.name!r})"

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


def named_slots(devices: int, per_host: int) -> tuple[Group, ...]:
    """The slots d0, d1, … on hosts of so many each, the last with what is left."""
    names = [f"d{i}" for i in range(devices)]
    return tuple(tuple(names[i : i + per_host]) for i in range(0, devices, per_host))


# --- reading ----------------------------------------------------------------------------------


MOST_SLOTS = 10**6
"""More than any cluster has; a number of hosts beyond that is a slip."""

_LINK: Mapping[str, Quantity] = {"latency": "seconds", "bandwidth": "bytes a second"}


def read_cluster(text: str, file: str) -> Cluster:
    """The cluster that the text of a file describes. Raises PlanError with line and key."""
    root = read_tree(text, file)
    fields = root.fields(("hosts", "devices_per_host", "device", "links"))
    hosts = _read_hosts(root, fields)
    device = _read_device(_needed(root, fields, "device", "what each slot is"))
    links = fields["links"].fields(("inside", "between")) if "links" in fields else {}
    needed = {
        "inside": (any(len(host) > 1 for host in hosts), "a host has several slots"),
        "between": (len(hosts) > 1, f"there are {len(hosts)} hosts"),
    }
    for name, (is_needed, why) in needed.items():
        if is_needed and name not in links:
            raise fields.get("links", root).error(
                f"there is no link {name!r}, but {why}; give links.{name} a latency and a "
                f"bandwidth, or a name: {', '.join(LINKS)}"
            )
    found = {name: _read_links(branch) for name, branch in links.items()}
    try:
        return Cluster(hosts, found.get("inside", SHARED), found.get("between", ETHERNET), device)
    except PlanError as error:
        raise PlanError(f"{file}: {error}") from None


def _needed(at: Branch, fields: Mapping[str, Branch], key: str, meaning: str) -> Branch:
    if key not in fields:
        raise at.error(f"the key {key!r} is missing: {meaning}")
    return fields[key]


def _read_hosts(root: Branch, fields: Mapping[str, Branch]) -> tuple[Group, ...]:
    hosts = _needed(root, fields, "hosts", "how many hosts, or the names of the slots of each")
    if hosts.is_list:
        if "devices_per_host" in fields:
            raise fields["devices_per_host"].error("hosts names the slots already; leave this out")
        found = tuple(tuple(item.text() for item in host.items()) for host in hosts.items())
        if not found or not all(found):
            raise hosts.error("found a host without slots, expected one slot or more on each host")
        return found
    count = hosts.count()
    per_host = _needed(root, fields, "devices_per_host", "how many slots a host has").count()
    if count * per_host > MOST_SLOTS:
        raise hosts.error(f"found {count * per_host} slots, expected {MOST_SLOTS} at most")
    return named_slots(count * per_host, per_host)


def _read_device(at: Branch) -> DeviceModel:
    if at.is_text:
        if at.text() not in DEVICES:
            raise at.error(f"found {at.text()!r}, expected one of {', '.join(DEVICES)}, or fields")
        return DEVICES[at.text()]
    fields = at.fields(("name", "kind", *FIGURES))
    kind = _needed(at, fields, "kind", ", ".join(get_args(DeviceKind)))
    if kind.text() not in get_args(DeviceKind):
        raise kind.error(
            f"found {kind.text()!r}, expected one of {', '.join(get_args(DeviceKind))}"
        )
    for key in (field.name for field in msgspec.structs.fields(DeviceModel) if field.required):
        _needed(at, fields, key, f"a device has name, kind, {', '.join(FIGURES)}")
    numbers: dict[str, Any] = {
        key: fields[key].number(unit) for key, unit in FIGURES.items() if key in fields
    }
    try:
        return DeviceModel(fields["name"].text(), kind.text(), **numbers)  # type: ignore[arg-type]
    except PlanError as error:
        raise at.error(str(error)) from None


def _read_links(at: Branch) -> Links:
    if at.is_text:
        if at.text() not in LINKS:
            raise at.error(f"found {at.text()!r}, expected one of {', '.join(LINKS)}, or fields")
        return LINKS[at.text()]
    fields = at.fields(("latency", "bandwidth", "start", "collective", *KINDS))
    each: dict[str, Any] = {
        kind: _read_link(at, fields, kind)
        for kind in KINDS
        if kind not in OPTIONAL or kind in fields
    }
    start = fields["start"].number("seconds") if "start" in fields else 0.0
    try:
        return Links(**each, start=start)
    except PlanError as error:
        raise fields["start"].error(str(error)) from None


def _read_link(at: Branch, fields: Mapping[str, Branch], kind: str) -> Link:
    """The link of a kind: its own, that of all collectives, or that of everything."""
    names = (kind, "collective") if kind in COLLECTIVES else (kind,)
    own = next((fields[name] for name in names if name in fields), None)
    if own is not None:
        at, fields = own, own.fields(tuple(_LINK))
    for key in _LINK:
        if key not in fields:
            raise at.error(
                f"{kind} lacks a {key}; give {key} for all kinds of communication, or {kind}: "
                "{latency: …, bandwidth: …}"
            )
    numbers = [fields[key].number(unit) for key, unit in _LINK.items()]
    try:
        return Link(*numbers)
    except PlanError as error:
        raise at.error(str(error)) from None


# --- writing ----------------------------------------------------------------------------------


def _yaml(document: dict[str, Any], inline: bool = True) -> str:
    """YAML with the innermost lists and mappings on one line each, or one line a value."""
    style = None if inline else False
    text = yaml.safe_dump(document, sort_keys=False, default_flow_style=style, width=1000)
    return str(text)


def _written_hosts(hosts: Sequence[Group]) -> dict[str, Any]:
    per_host = len(hosts[0]) if hosts else 1
    if hosts and tuple(hosts) == named_slots(len(hosts) * per_host, per_host):
        return {"hosts": len(hosts), "devices_per_host": per_host}
    return {"hosts": [list(host) for host in hosts]}


def links_text(links: Links) -> str:
    """Links as a file says them, on one line."""
    return _on_a_line(_written_links(links))


def _on_a_line(found: str | dict[str, Any]) -> str:
    """A name as it is, or fields in braces."""
    text = yaml.safe_dump(found, sort_keys=False, default_flow_style=True, width=1000)
    return found if isinstance(found, str) else str(text).strip()


def device_text(device: DeviceModel) -> str:
    """A device as a file says it, on one line."""
    return _on_a_line(_written_device(device))


def _written_device(device: DeviceModel) -> str | dict[str, str]:
    if DEVICES.get(device.name) == device:
        return device.name
    numbers = {key: getattr(device, key) for key in FIGURES}
    return {"name": device.name, "kind": device.kind} | {
        key: written(number, FIGURES[key]) for key, number in numbers.items() if number is not None
    }


def _written_links(links: Links) -> str | dict[str, Any]:
    for name, known in LINKS.items():
        if known == links:
            return name
    each: dict[str, Link] = {kind: getattr(links, kind) for kind in ("send", *COLLECTIVES)}
    told = {kind: link for kind in OPTIONAL if (link := getattr(links, kind)) is not None}
    optional: dict[str, Any] = {kind: _written_link(link) for kind, link in told.items()}
    start = {"start": written(links.start, "seconds")} if links.start else {}
    if len(set(each.values())) == 1:
        return _written_link(links.send) | start | optional
    if len({each[kind] for kind in COLLECTIVES}) == 1:
        each = {"send": links.send, "collective": links.all_gather}
    return start | {kind: _written_link(link) for kind, link in each.items()} | optional


def _written_link(link: Link) -> dict[str, str]:
    return {key: written(getattr(link, key), unit) for key, unit in _LINK.items()}


# --- YAML with lines ------------------------------------------------------------------------------
#
# Scalars stay texts: what they mean the reader says, not YAML (to which ``5e-6`` is a string, and
# ``no`` a falsehood).


MOST_BYTES = 10**18
"""More than any device has."""
MOST_DIGITS = 20
"""Of a number of things."""


@dataclass(frozen=True, slots=True)
class Branch:
    """What stands at one place; ``key`` is the way to it (``links.inside``)."""

    node: yaml.Node
    key: str
    file: str

    def error(self, message: str) -> PlanError:
        """An error that says where this is."""
        line = self.node.start_mark.line + 1
        return PlanError(f"{self.file}, line {line}{self.key and f', {self.key}'}: {message}")

    @property
    def is_text(self) -> bool:
        """Whether this is neither a mapping nor a list."""
        return isinstance(self.node, yaml.ScalarNode)

    @property
    def is_list(self) -> bool:
        """Whether this is a list."""
        return isinstance(self.node, yaml.SequenceNode)

    def text(self) -> str:
        """The text that stands here. Raises PlanError."""
        if not self.is_text:
            raise self.error(f"found {self._what}, expected a value")
        return str(self.node.value)

    def number(self, quantity: Quantity) -> float:
        """The number of a quantity that stands here, a whole one for bytes. Raises PlanError."""
        try:
            exact = parsed(self.text(), quantity)
        except ValueError as error:
            raise self.error(str(error)) from None
        if quantity != "bytes":
            return float(exact)
        if abs(exact) > MOST_BYTES or exact != exact.to_integral_value():
            raise self.error(
                f"found {self.text()!r}, expected whole bytes, {MOST_BYTES:.0e} at most"
            )
        return int(exact)

    def count(self) -> int:
        """The whole number from 1 up that stands here. Raises PlanError."""
        text = self.text()
        if not (text.isascii() and text.isdigit() and len(text) < MOST_DIGITS and int(text)):
            raise self.error(f"found {text[:80]!r}, expected a number from 1 up")
        return int(text)

    def items(self) -> list[Branch]:
        """The items of the list that stands here. Raises PlanError."""
        if not self.is_list:
            raise self.error(f"found {self._what}, expected a list")
        return [
            Branch(node, f"{self.key}[{i}]", self.file) for i, node in enumerate(self.node.value)
        ]

    def fields(self, known: Collection[str]) -> dict[str, Branch]:
        """What stands here under each key, all of them known. Raises PlanError."""
        if not isinstance(self.node, yaml.MappingNode):
            raise self.error(f"found {self._what}, expected {', '.join(known)}")
        found: dict[str, Branch] = {}
        for key_node, node in self.node.value:
            key = str(key_node.value)
            branch = Branch(node, f"{self.key}.{key}" if self.key else key, self.file)
            if key not in known:
                raise branch.error(f"unknown key; known here are {', '.join(known)}")
            if key in found:
                raise branch.error("the key stands here twice; keep one")
            found[key] = branch
        return found

    @property
    def _what(self) -> str:
        kinds = {yaml.MappingNode: "keys with values", yaml.SequenceNode: "a list"}
        return kinds.get(type(self.node)) or repr(self.node.value)


def read_tree(text: str, file: str) -> Branch:
    """The tree of a text. Raises PlanError where it is no YAML, or empty."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{file}, line {mark.line + 1}" if mark else file
        raise PlanError(f"{where}: not YAML: {getattr(error, 'problem', error)}") from None
    if node is None:
        raise PlanError(f"{file} is empty")
    return Branch(node, "", file)
