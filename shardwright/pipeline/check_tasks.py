"""Rules of devices and supertasks, one by one: names, fields by kind, metadata by kind."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.pipeline.connections import Connections
from shardwright.pipeline.rules import (
    COMMUNICATION,
    FAMILIES,
    FAMILY_OF,
    REDUCE_OPS,
    CommunicationRule,
    MetadataType,
    broken,
)
from shardwright.pipeline.schema import FORMAT_VERSION, Document, SuperTask


def check_version(document: Document, _: Connections) -> None:
    """The version is one that is known; none is the specification's own format."""
    if document.version not in (None, FORMAT_VERSION):
        raise broken(
            "version",
            f"the file is of format version {document.version}, expected {FORMAT_VERSION}",
        )


def check_names(document: Document, connections: Connections) -> None:
    """No name is empty."""
    for kind, names in (
        ("device", document.devices),
        ("tensor", document.tensors),
        ("supertask", document.supertasks),
        ("group", connections.groups),
        ("blob", document.blobs or {}),
    ):
        if "" in names:
            raise broken("names", f"a {kind} has an empty name; give it one")


def check_devices(document: Document, connections: Connections) -> None:
    """Devices are distinct and all of them run something."""
    seen: dict[tuple[object, ...], str] = {}
    for name, device in document.devices.items():
        place = (device.host, device.kind, device.idx)
        if place in seen:
            host = f" on host {device.host!r}" if device.host else ""
            raise broken(
                "device-unique",
                f"devices {seen[place]!r} and {name!r} are both {device.kind}:{device.idx}{host}; "
                "give each slot a device of its own",
            )
        seen[place] = name
        if device.pes is not None and (not device.pes or len(set(device.pes)) != len(device.pes)):
            raise broken(
                "device-unique",
                f"device {name!r} has the pes {list(device.pes)}; list each fused processing "
                "element once, or leave pes out",
            )
        if not connections.order[name]:
            raise broken(
                "device-used", f"device {name!r} runs no supertask; leave it out of devices"
            )


def check_tasks(document: Document, _: Connections) -> None:
    """Each supertask has its kind's fields, a known device, and its kind's metadata and counts."""
    for name, task in document.supertasks.items():
        _check_fields(name, task)
        if task.device is not None and task.device not in document.devices:
            raise _unknown_device(document, task.device, name)
        if task.kind in COMMUNICATION:
            _check_metadata(document, name, task)
        _check_counts(name, task)


_OPTIONAL_FIELDS = ("device", "data", "data_blob", "group", "device_idx", "metadata", "phase")
"""Every field of a supertask that does not stand on all of them."""


def _check_fields(name: str, task: SuperTask) -> None:
    family_name = FAMILY_OF[task.kind]
    family = FAMILIES[family_name]
    present = {field for field in _OPTIONAL_FIELDS if getattr(task, field) is not None}
    kind = f"a {family_name} supertask ({task.kind})"
    for field in family.required:
        if field not in present:
            raise broken("fields", f"{kind} needs the field {field!r}, which is absent", task=name)
    choice = [field for field in family.one_of if field in present]
    if family.one_of and len(choice) != 1:
        raise broken(
            "fields",
            f"{kind} needs exactly one of {' and '.join(family.one_of)}, found "
            f"{' and '.join(choice) or 'none'}",
            task=name,
        )
    extra = present.difference(family.required, family.one_of, family.optional)
    if extra:
        raise broken("fields", f"{kind} cannot have the field {min(extra)!r}; remove it", task=name)


def _unknown_device(document: Document, device: str, task: str) -> Exception:
    known = ", ".join(map(repr, document.devices)) or "none"
    return broken("device-known", f"device {device!r} is not among devices: {known}", task=task)


def _check_metadata(document: Document, name: str, task: SuperTask) -> None:
    assert task.metadata is not None
    expected = COMMUNICATION[task.kind].metadata
    if task.metadata.keys() != expected.keys():
        raise broken(
            "task-metadata",
            f"the metadata of {task.kind} has the keys {sorted(task.metadata)}, expected "
            f"{sorted(expected)}",
            task=name,
        )
    for key, kind in expected.items():
        found = task.metadata[key]
        if kind == "device" and isinstance(found, str) and found not in document.devices:
            raise _unknown_device(document, found, name)
        if not _fits(found, kind):
            raise broken(
                "task-metadata",
                f"metadata {key!r} is {found!r}, expected {_EXPECTED[kind]}",
                task=name,
            )


_EXPECTED: dict[MetadataType, str] = {
    "reduce_op": f"one of {', '.join(REDUCE_OPS)}",
    "device": "a key of devices",
    "dim": "a dimension, counted from 0",
}


def _fits(found: int | str, kind: MetadataType) -> bool:
    if kind == "reduce_op":
        return found in REDUCE_OPS
    return isinstance(found, str if kind == "device" else int)


def _check_counts(name: str, task: SuperTask) -> None:
    """The number of inputs and outputs is the kind's; computation may have any."""
    for side, found, expected in _counts(task):
        if found != expected:
            raise broken(
                "task-tensors",
                f"{task.kind} has {found} {side} here, expected {expected}",
                task=name,
            )


def _counts(task: SuperTask) -> Iterator[tuple[str, int, int]]:
    """Side, number of tensors found there, number expected."""
    if task.kind == "input":
        yield "inputs", len(task.inputs), 0
    elif task.kind == "output":
        yield "outputs", len(task.outputs), 0
    elif task.kind in COMMUNICATION:
        inputs, outputs = _expected_counts(COMMUNICATION[task.kind], task)
        yield "inputs", len(task.inputs), inputs
        yield "outputs", len(task.outputs), outputs


def _expected_counts(row: CommunicationRule, task: SuperTask) -> tuple[int, int]:
    assert task.metadata is not None
    is_root = row.root is not None and task.metadata[row.root] == task.device
    return row.root_tensors if is_root else row.tensors


def check_ends(_: Document, connections: Connections) -> None:
    """There is one input and one output supertask."""
    for kind, tasks in connections.ends.items():
        if len(tasks) != 1:
            raise broken(
                f"one-{kind}-task",
                f"found {len(tasks)} supertasks of kind {kind!r}, expected exactly one",
                task=tasks[1] if tasks else None,
            )
