"""Index of a document: who makes and who uses a tensor, and which supertasks belong together.

Every fact is as it stands in the file, in file order, so that rules can be checked on it. The
methods are for documents that passed the rules they name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from shardwright.pipeline.schema import Document


@dataclass(frozen=True, slots=True)
class Connections:
    """The facts of one document; see the fields."""

    document: Document
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

    def producer(self, tensor: str) -> str | None:
        """The supertask of a device that makes a tensor; None for constants and pipeline inputs."""
        producers = self.producers.get(tensor)
        if producers is None or self.document.supertasks[producers[0]].device is None:
            return None
        return producers[0]

    def on_devices(self) -> Iterator[str]:
        """The supertasks that devices run, device by device."""
        for tasks in self.order.values():
            yield from tasks


def connect(document: Document) -> Connections:
    """The connections of a document."""
    found = Connections(document, order={device: [] for device in document.devices})
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
    for tensor, users in found.users.items():
        if (device := document.supertasks[users[0]].device) is not None:
            found.devices[tensor] = device
    for tensor, piece in document.metadata.tensor_slices.inputs.items():
        found.devices[tensor] = piece.device
    for tensor, producers in found.producers.items():
        if (device := document.supertasks[producers[0]].device) is not None:
            found.devices[tensor] = device
    return found
