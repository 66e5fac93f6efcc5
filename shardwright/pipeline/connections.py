"""Who makes a tensor, who uses it, and which supertasks belong together: an index of a document.

Comes in: a document, checked or not. Goes out: `Connections`, which hold every fact as it stands
in the file, in file order, so that rules can be checked on it. The methods are for documents that
are known to be good.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shardwright.pipeline.schema import Document


@dataclass(frozen=True, slots=True)
class Connections:
    """The facts of one document; see the fields."""

    producers: dict[str, list[str]] = field(default_factory=dict)
    """Tensor to the supertasks that have it among their outputs."""
    users: dict[str, list[str]] = field(default_factory=dict)
    """Tensor to the supertasks that have it among their inputs."""
    groups: dict[str, list[str]] = field(default_factory=dict)
    """Communication group to its supertasks, by ``device_idx``."""
    order: dict[str, list[str]] = field(default_factory=dict)
    """Device to its supertasks in file order; every device of the document is a key."""
    ends: dict[str, list[str]] = field(default_factory=dict)
    """``input`` and ``output`` to the supertasks of that kind."""
    devices: dict[str, str] = field(default_factory=dict)
    """Tensor to the device where it is: its producer's, its slice's, or its first user's."""


def connect(document: Document) -> Connections:
    """The connections of a document."""
    found = Connections(order={device: [] for device in document.devices})
    found.ends.update({"input": [], "output": []})
    for name, task in document.supertasks.items():
        for tensor in task.inputs:
            found.users.setdefault(tensor, []).append(name)
        for tensor in task.outputs:
            found.producers.setdefault(tensor, []).append(name)
        if task.group is not None:
            found.groups.setdefault(task.group, []).append(name)
        if task.device is not None:
            found.order.setdefault(task.device, []).append(name)
        if task.kind in found.ends:
            found.ends[task.kind].append(name)
    for members in found.groups.values():
        members.sort(key=lambda name: document.supertasks[name].device_idx or 0)
    _place(document, found)
    return found


def _place(document: Document, found: Connections) -> None:
    """Fill ``found.devices``."""
    for tensor, users in found.users.items():
        device = document.supertasks[users[0]].device
        if device is not None:
            found.devices[tensor] = device
    for tensor, piece in document.metadata.tensor_slices.inputs.items():
        found.devices[tensor] = piece.device
    for tensor, producers in found.producers.items():
        device = document.supertasks[producers[0]].device
        if device is not None:
            found.devices[tensor] = device
