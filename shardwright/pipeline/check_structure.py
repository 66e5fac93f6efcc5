"""Rules of supertasks and devices, and of the order in which devices can work off the file.

The proof that nothing waits for ever runs the file: each device goes through its supertasks in file
order, computation passes, and communication passes when every member of its group has come to it.
What cannot move then is a deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from typing import NamedTuple

from msgspec.structs import fields

from shardwright.communication import COMMUNICATION, MetadataType
from shardwright.errors import PipelineError
from shardwright.pipeline.connections import Connections
from shardwright.pipeline.rules import (
    FAMILIES,
    FAMILY_OF,
    REDUCE_OPS,
    Finding,
    broken,
)
from shardwright.pipeline.schema import FORMAT_VERSION, Document, SuperTask


def check_version(index: Connections) -> Finding:
    """The version is one that is known; none is the specification's own format."""
    if (version := index.document.version) in (None, FORMAT_VERSION):
        return None
    return f"the file is of format version {version}, expected {FORMAT_VERSION}"


def check_names(index: Connections) -> Finding:
    """No name is empty."""
    document = index.document
    for kind, names in (
        ("device", document.devices),
        ("tensor", document.tensors),
        ("supertask", document.supertasks),
        ("group", index.groups),
        ("blob", document.blobs or {}),
    ):
        if "" in names:
            return f"a {kind} has an empty name; give it one"
    return None


_OPTIONAL_FIELDS = tuple(field.name for field in fields(SuperTask) if not field.required)
"""Every field of a supertask that does not stand on all of them."""


def check_fields(index: Connections, name: str, task: SuperTask) -> Finding:
    """A supertask has its kind's fields."""
    family_name = FAMILY_OF[task.kind]
    family = FAMILIES[family_name]
    present = {field for field in _OPTIONAL_FIELDS if getattr(task, field) is not None}
    kind = f"a {family_name} supertask ({task.kind})"
    for field in family.required:
        if field not in present:
            return f"{kind} needs the field {field!r}, which is absent"
    choice = [field for field in family.one_of if field in present]
    if family.one_of and len(choice) != 1:
        either, found = " and ".join(family.one_of), " and ".join(choice) or "none"
        return f"{kind} needs exactly one of {either}, found {found}"
    if extra := present.difference(family.required, family.one_of, family.optional):
        return f"{kind} cannot have the field {min(extra)!r}; remove it"
    return None


_EXPECTED: dict[MetadataType, tuple[str, Callable[[object], bool]]] = {
    "reduce_op": (f"one of {', '.join(REDUCE_OPS)}", lambda found: found in REDUCE_OPS),
    "device": ("a key of devices", lambda found: isinstance(found, str)),
    "dim": ("a dimension, counted from 0", lambda found: isinstance(found, int)),
}
"""What each type of metadata must be, in words and as a test."""


def check_metadata(index: Connections, name: str, task: SuperTask) -> Finding:
    """A communication has its kind's metadata."""
    assert task.metadata is not None
    found, expected = task.metadata, COMMUNICATION[task.kind].metadata
    if found.keys() != expected.keys():
        keys = sorted(expected)
        return f"the metadata of {task.kind} has the keys {sorted(found)}, expected {keys}"
    for key, kind in expected.items():
        words, fits = _EXPECTED[kind]
        if not fits(found[key]):
            return f"metadata {key!r} is {found[key]!r}, expected {words}"
    return None


def check_devices_known(index: Connections, name: str, task: SuperTask) -> Finding:
    """Devices that a supertask names are there."""
    row, metadata = COMMUNICATION.get(task.kind), task.metadata or {}
    root = str(metadata[row.root]) if row is not None and row.root is not None else None
    for device in (task.device, root):
        if device is not None and device not in index.document.devices:
            return unknown_device(index.document, device)
    return None


def unknown_device(document: Document, device: str) -> str:
    """What is wrong with a device that is not there."""
    known = ", ".join(map(repr, document.devices)) or "none"
    return f"device {device!r} is not among devices: {known}"


def check_counts(index: Connections, name: str, task: SuperTask) -> Finding:
    """A supertask has as many inputs and outputs as its kind says; computation may have any."""
    inputs: int | None = 0 if task.kind == "input" else None
    outputs: int | None = 0 if task.kind == "output" else None
    if (row := COMMUNICATION.get(task.kind)) is not None:
        assert task.metadata is not None
        is_root = row.root is not None and task.metadata[row.root] == task.device
        inputs, outputs = row.counts(is_root=is_root)
    for side, names, expected in (
        ("inputs", task.inputs, inputs),
        ("outputs", task.outputs, outputs),
    ):
        if expected not in (None, len(names)):
            return f"{task.kind} has {len(names)} {side} here, expected {expected}"
    return None


def check_devices_unique(index: Connections) -> Finding:
    """Devices are distinct, and so are the processing elements of each."""
    seen: dict[tuple[object, ...], str] = {}
    for name, device in index.document.devices.items():
        other = seen.setdefault((device.host, device.kind, device.idx), name)
        if other != name:
            host = f" on host {device.host!r}" if device.host else ""
            return (
                f"devices {other!r} and {name!r} are both {device.kind}:{device.idx}{host}; "
                "give each slot a device of its own"
            )
        if device.pes is not None and (not device.pes or len(set(device.pes)) != len(device.pes)):
            return (
                f"device {name!r} has the pes {list(device.pes)}; list each fused processing "
                "element once, or leave pes out"
            )
    return None


def check_devices_used(index: Connections) -> Finding:
    """Each device runs something."""
    for name in index.document.devices:
        if not index.order[name]:
            return f"device {name!r} runs no supertask; leave it out of devices"
    return None


def check_ends(index: Connections, *, kind: str) -> Finding:
    """There is one input and one output supertask."""
    if len(tasks := index.ends[kind]) == 1:
        return None
    message = f"found {len(tasks)} supertasks of kind {kind!r}, expected exactly one"
    return broken(f"one-{kind}-task", message, task=tasks[1] if tasks else None)


# --- order --------------------------------------------------------------------------------------


def check_order(index: Connections) -> Finding:
    """Each device finds the inputs of a supertask made by earlier ones of its own."""
    position = {name: i for i, name in enumerate(index.document.supertasks)}
    for name in index.on_devices():
        for tensor in index.document.supertasks[name].inputs:
            producer = index.producer(tensor)
            if producer is not None and position[producer] >= position[name]:
                return _cycle(index) or broken(
                    "file-order",
                    f"supertask {producer!r}, which makes the tensor, stands later in the "
                    "file; put it before",
                    task=name,
                    tensor=tensor,
                )
    return None


def _cycle(index: Connections) -> PipelineError | None:
    """The error for a cycle through tensors and groups, where there is one."""
    document = index.document
    waits: TopologicalSorter[str] = TopologicalSorter()
    for name, task in document.supertasks.items():
        for tensor in task.inputs:
            if (producer := index.producer(tensor)) is not None:
                waits.add(_unit(document, name), _unit(document, producer))
    try:
        waits.prepare()
    except CycleError as error:
        units = error.args[1]
        first = next(name for name in document.supertasks if _unit(document, name) in units)
        return broken("no-cycle", f"{' waits for '.join(reversed(units))}; break it", task=first)
    return None


def _unit(document: Document, task: str) -> str:
    """What runs as one: a supertask, or a whole group."""
    group = document.supertasks[task].group
    return f"supertask {task!r}" if group is None else f"group {group!r}"


def check_deadlock(index: Connections) -> Finding:
    """All supertasks run, each device in file order, with every communication blocking."""
    stuck = stuck_in_file_order(index)
    if not stuck:
        return None
    tasks = index.document.supertasks
    fronts = ", ".join(
        f"{device!r} at {task!r} (group {tasks[task].group!r})" for device, task in stuck.items()
    )
    task = next(iter(stuck.values()))
    return _cycle(index) or broken(
        "no-deadlock",
        f"devices wait for one another: {fronts}; put the communications of these devices in "
        "one order",
        task=task,
        tensor=next(chain(tasks[task].inputs, tasks[task].outputs)),
    )


def stuck_in_file_order(index: Connections) -> dict[str, str]:
    """The supertask at which each device waits for ever, if any does, when all of them block."""
    tasks = index.document.supertasks
    visits = {
        device: [GroupVisit(name) for name in names if tasks[name].group is not None]
        for device, names in index.order.items()
    }
    stuck = run_communications(index, visits, sends_wait=True)
    return {device: visit.task for device, visit in stuck.items()}


class GroupVisit(NamedTuple):
    """A device does its part in a communication, for a microbatch or once."""

    task: str
    microbatch: int | None = None


def run_communications(
    index: Connections, visits: Mapping[str, Sequence[GroupVisit]], *, sends_wait: bool
) -> dict[str, GroupVisit]:
    """Take devices through their communications; gives the visits at which some wait for ever.

    A communication waits for all members of its group; with ``sends_wait`` False a send waits for
    nobody and a recv for its send. Where this comes to a standstill every order does, since what
    can go on stays able to. Time is linear in the visits.
    """
    at = dict.fromkeys(visits, 0)
    sent: set[tuple[str | None, int | None]] = set()
    waiting: dict[tuple[str | None, int | None], list[str]] = {}

    def visit(device: str, task: SuperTask, moment: tuple[str | None, int | None]) -> list[str]:
        """The devices that go on from here; none where this one has to wait."""
        others = waiting.pop(moment, [])
        if task.kind == "send" and not sends_wait:
            sent.add(moment)
            return [device, *others]
        alone = task.kind == "recv" and not sends_wait
        if moment in sent if alone else len(others) + 1 == len(index.groups[task.group or ""]):
            return [device, *others]
        waiting[moment] = [*others, device]
        return []

    ready = list(visits)
    while ready:
        device = ready.pop()
        if at[device] == len(visits[device]):
            continue
        name, microbatch = visits[device][at[device]]
        task = index.document.supertasks[name]
        for moved in visit(device, task, (task.group, microbatch)):
            at[moved] += 1
            ready.append(moved)
    left = {device: found[at[device] :] for device, found in visits.items()}
    return {device: found[0] for device, found in left.items() if found}
