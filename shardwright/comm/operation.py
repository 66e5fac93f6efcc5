"""One communication of a group, as every member knows it.

In comes the pipeline file's part about communication: supertasks that share a ``group``, and the
`TensorInfo` of their tensors. Out comes one `Operation` a group, the same on every rank, so that
each member knows the sizes of all others without asking. The pair send and recv is one operation
of two members.

What always holds: member ``i`` is the supertask with ``device_idx`` ``i``; its rank is the place
of its device slot in ``Document.devices``; tags number the groups in the order of their names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from shardwright.comm.spec import TensorSpec
from shardwright.pipeline.schema import Document, SuperTask


@dataclass(frozen=True, slots=True)
class Operation:
    """A communication: who takes part, what each gives and gets, and how it is combined.

    kind
        A communication kind of the format; ``send`` for a pair of send and recv.
    tag
        The group's number, unique in the pipeline.
    ranks, tasks, inputs, outputs
        One entry a member. ``inputs[i]`` is None where member ``i`` gives nothing, ``outputs[i]``
        where it gets nothing.
    reduce_op, dim, src_dim, dst_dim
        The format's metadata, None where the kind has no such key.
    root
        The member that ``src`` or ``dst`` names, None where the kind has neither.
    """

    kind: str
    group: str
    tag: int
    ranks: tuple[int, ...]
    tasks: tuple[str, ...]
    inputs: tuple[TensorSpec | None, ...]
    outputs: tuple[TensorSpec | None, ...]
    reduce_op: str | None = None
    dim: int | None = None
    src_dim: int | None = None
    dst_dim: int | None = None
    root: int | None = None

    @property
    def size(self) -> int:
        """How many members."""
        return len(self.ranks)

    def given(self, member: int) -> TensorSpec:
        """What a member that has an input gives."""
        spec = self.inputs[member]
        assert spec is not None, f"member {member} of group {self.group} gives nothing"
        return spec

    def gotten(self, member: int) -> TensorSpec:
        """What a member that has an output gets."""
        spec = self.outputs[member]
        assert spec is not None, f"member {member} of group {self.group} gets nothing"
        return spec


@dataclass(frozen=True, slots=True)
class Membership:
    """A supertask's part in an operation."""

    operation: Operation
    member: int


def memberships(document: Document) -> dict[str, Membership]:
    """The operation and place in it of every communication supertask, by supertask.

    The document must have passed `pipeline.check`.
    """
    groups: dict[str, dict[str, SuperTask]] = {}
    for task_id, task in document.supertasks.items():
        if task.group is not None:
            groups.setdefault(task.group, {})[task_id] = task
    found: dict[str, Membership] = {}
    for tag, group in enumerate(sorted(groups)):
        operation = _operation(document, group, tag, groups[group])
        found.update({task: Membership(operation, i) for i, task in enumerate(operation.tasks)})
    return found


def operations(document: Document) -> list[Operation]:
    """Every operation of a document, by tag."""
    found = {part.operation.tag: part.operation for part in memberships(document).values()}
    return [found[tag] for tag in sorted(found)]


def _operation(document: Document, group: str, tag: int, tasks: dict[str, SuperTask]) -> Operation:
    """The operation of one group."""
    ordered = dict(sorted(tasks.items(), key=lambda item: item[1].device_idx or 0))
    members = list(ordered.values())
    slots = [task.device for task in members]
    metadata = members[0].metadata or {}
    root = metadata.get("src", metadata.get("dst"))
    dims = {key: cast("int | None", metadata.get(key)) for key in ("dim", "src_dim", "dst_dim")}
    return Operation(
        kind=members[0].kind,
        group=group,
        tag=tag,
        ranks=tuple(list(document.devices).index(str(slot)) for slot in slots),
        tasks=tuple(ordered),
        inputs=tuple(_spec(document, task.inputs) for task in members),
        outputs=tuple(_spec(document, task.outputs) for task in members),
        reduce_op=cast("str | None", metadata.get("reduce_op")),
        root=slots.index(str(root)) if root is not None else None,
        **dims,
    )


def _spec(document: Document, names: tuple[str, ...]) -> TensorSpec | None:
    return TensorSpec.of(document.tensors[names[0]]) if names else None
