"""Rules of supertasks and devices, and of the order in which devices can work off the file.

The proof that nothing waits for ever runs the file: each device goes through its supertasks in file
order, computation passes, and communication passes when every member of its group has come to it.
What cannot move then is a deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from typing import NamedTuple

from shardwright.errors import PipelineError
from shardwright.pipeline.connections import Connections
from shardwright.pipeline.rules import (
    COMMUNICATION,
    FAMILIES,
    FAMILY_OF,
    REDUCE_OPS,
    MetadataType,
    broken,
)
from shardwright.pipeline.schema import FORMAT_VERSION, Device, Document, SuperTask


def check_version(index: Connections) -> None:
    """The version is one that is known; none is the specification's own format."""
    version = index.document.version
    if version not in (None, FORMAT_VERSION):
        raise broken(
            "version", f"the file is of format version {version}, expected {FORMAT_VERSION}"
        )


def check_names(index: Connections) -> None:
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
            raise broken("names", f"a {kind} has an empty name; give it one")


def check_tasks(index: Connections) -> None:
    """Each supertask has its kind's fields, a known device, and its kind's metadata and counts."""
    document = index.document
    for name, task in document.supertasks.items():
        _check_fields(name, task)
        if task.device is not None and task.device not in document.devices:
            raise unknown_device(document, task.device, task=name)
        if task.kind in COMMUNICATION:
            _check_metadata(document, name, task)
        for side, found, expected in _counts(task):
            if found != expected:
                raise broken(
                    "task-tensors",
                    f"{task.kind} has {found} {side} here, expected {expected}",
                    task=name,
                )


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


def unknown_device(document: Document, device: str, **where: str) -> PipelineError:
    """The error for a device that is not there; ``where`` is a task or a tensor that names it."""
    known = ", ".join(map(repr, document.devices)) or "none"
    return broken("device-known", f"device {device!r} is not among devices: {known}", **where)


_EXPECTED: dict[MetadataType, tuple[str, Callable[[object], bool]]] = {
    "reduce_op": (f"one of {', '.join(REDUCE_OPS)}", lambda found: found in REDUCE_OPS),
    "device": ("a key of devices", lambda found: isinstance(found, str)),
    "dim": ("a dimension, counted from 0", lambda found: isinstance(found, int)),
}
"""What each type of metadata must be, in words and as a test."""


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
        words, fits = _EXPECTED[kind]
        if not fits(found):
            raise broken(
                "task-metadata", f"metadata {key!r} is {found!r}, expected {words}", task=name
            )
        if kind == "device" and found not in document.devices:
            raise unknown_device(document, str(found), task=name)


def _counts(task: SuperTask) -> Iterator[tuple[str, int, int]]:
    """Side, number of tensors found there, number expected; computation may have any."""
    if task.kind == "input":
        yield "inputs", len(task.inputs), 0
    elif task.kind == "output":
        yield "outputs", len(task.outputs), 0
    elif task.kind in COMMUNICATION:
        assert task.metadata is not None
        row = COMMUNICATION[task.kind]
        is_root = row.root is not None and task.metadata[row.root] == task.device
        inputs, outputs = row.root_tensors if is_root else row.tensors
        yield "inputs", len(task.inputs), inputs
        yield "outputs", len(task.outputs), outputs


def check_devices(index: Connections) -> None:
    """Devices are distinct and all of them run something."""
    seen: dict[tuple[object, ...], str] = {}
    for name, device in index.document.devices.items():
        _check_distinct(name, device, seen)
        if not index.order[name]:
            raise broken(
                "device-used", f"device {name!r} runs no supertask; leave it out of devices"
            )


def _check_distinct(name: str, device: Device, seen: dict[tuple[object, ...], str]) -> None:
    other = seen.setdefault((device.host, device.kind, device.idx), name)
    if other != name:
        host = f" on host {device.host!r}" if device.host else ""
        raise broken(
            "device-unique",
            f"devices {other!r} and {name!r} are both {device.kind}:{device.idx}{host}; "
            "give each slot a device of its own",
        )
    if device.pes is not None and (not device.pes or len(set(device.pes)) != len(device.pes)):
        raise broken(
            "device-unique",
            f"device {name!r} has the pes {list(device.pes)}; list each fused processing "
            "element once, or leave pes out",
        )


def check_ends(index: Connections) -> None:
    """There is one input and one output supertask."""
    for kind, tasks in index.ends.items():
        if len(tasks) != 1:
            raise broken(
                f"one-{kind}-task",
                f"found {len(tasks)} supertasks of kind {kind!r}, expected exactly one",
                task=tasks[1] if tasks else None,
            )


# --- order --------------------------------------------------------------------------------------


def check_order(index: Connections) -> None:
    """Each device finds the inputs of a supertask made by earlier ones of its own."""
    position = {name: i for i, name in enumerate(index.document.supertasks)}
    for name in index.on_devices():
        for tensor in index.document.supertasks[name].inputs:
            producer = index.producer(tensor)
            if producer is not None and position[producer] >= position[name]:
                raise _cycle(index) or broken(
                    "file-order",
                    f"supertask {producer!r}, which makes the tensor, stands later in the "
                    "file; put it before",
                    task=name,
                    tensor=tensor,
                )


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


def check_deadlock(index: Connections) -> None:
    """All supertasks run, each device in file order, with every communication blocking."""
    stuck = stuck_in_file_order(index)
    if not stuck:
        return
    if (cycle := _cycle(index)) is not None:
        raise cycle
    tasks = index.document.supertasks
    fronts = ", ".join(
        f"{device!r} at {task!r} (group {tasks[task].group!r})" for device, task in stuck.items()
    )
    task = next(iter(stuck.values()))
    raise broken(
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
