"""Rules of communication groups: each one is complete, and its tensors fit together.

A group is one communication: its supertasks run at once, one on each device, in the order of
``device_idx``. Sizes of uneven pieces are those of the members' tensors, larger pieces first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from shardwright.communication import COMMUNICATION, CommunicationRow, even_sizes
from shardwright.errors import PipelineError
from shardwright.pipeline.connections import Connections
from shardwright.pipeline.rules import MICROBATCH_PHASES, UNDEFINED, Finding, broken
from shardwright.pipeline.schema import Document, SuperTask, TensorInfo

Shape = tuple[int, ...]
Shapes = tuple[Sequence[Shape], Sequence[Shape]]
"""The shape that each input of a group must have, and each output; -1 stands for any size."""


@dataclass(frozen=True, slots=True)
class CommunicationGroup:
    """One communication: its members by ``device_idx``, with the tensors that each has."""

    name: str
    document: Document
    tasks: tuple[str, ...]
    members: tuple[SuperTask, ...]

    @property
    def inputs(self) -> list[TensorInfo]:
        """The input of each member that has one."""
        return [self.document.tensors[name] for m in self.members for name in m.inputs]

    @property
    def outputs(self) -> list[TensorInfo]:
        """The output of each member that has one."""
        return [self.document.tensors[name] for m in self.members for name in m.outputs]

    def tensors(self) -> Iterator[tuple[int, str, TensorInfo]]:
        """Each tensor, with the member whose it is."""
        for member, task in enumerate(self.members):
            for name in (*task.inputs, *task.outputs):
                yield member, name, self.document.tensors[name]

    @property
    def row(self) -> CommunicationRow:
        """The members' kind."""
        return COMMUNICATION[self.members[0].kind]

    @property
    def cut(self) -> int | None:
        """The dimension along which inputs are cut."""
        return self._dim(self.row.cut)

    @property
    def join(self) -> int | None:
        """The dimension along which pieces are joined."""
        return self._dim(self.row.join)

    def _dim(self, key: str | None) -> int | None:
        return None if key is None else int((self.members[0].metadata or {})[key])

    def broken(
        self, rule: str, message: str, member: int = 0, tensor: str | None = None
    ) -> PipelineError:
        """The error for a rule that this member breaks, with its first tensor unless one is given.

        Messages begin with the group's name.
        """
        task = self.members[member]
        tensor = tensor or next(iter((*task.inputs, *task.outputs)), None)
        return broken(
            rule, f"group {self.name!r}: {message}", task=self.tasks[member], tensor=tensor
        )

    def wrong_shape(self, member: int, tensor: str, expected: str) -> PipelineError:
        """The error for a member's tensor of another shape."""
        shape = list(self.document.tensors[tensor].shape)
        kind = self.members[member].kind
        return self.broken(
            "group-shape", f"{kind} has the shape {shape} here, expected {expected}", member, tensor
        )


def check_kinds(index: Connections, group: CommunicationGroup) -> Finding:
    """The members are of one kind, or one send and one recv."""
    kinds = [task.kind for task in group.members]
    if {"send", "recv"}.isdisjoint(kinds):
        odd = next((i for i, kind in enumerate(kinds) if kind != kinds[0]), None)
        if odd is not None:
            message = f"it holds {kinds[0]} and {kinds[odd]}; one kind a group"
            return group.broken("group-kind", message, odd)
    elif sorted(kinds) != ["recv", "send"]:
        message = f"it holds {', '.join(kinds)}; expected one send and one recv"
        return group.broken("group-kind", message)
    return None


def check_members(index: Connections, group: CommunicationGroup) -> Finding:
    """The members are numbered, two or more, each on a device of its own."""
    indices = [task.device_idx for task in group.members]
    if indices != list(range(len(indices))):
        odd = next(i for i, index in enumerate(indices) if index != i)
        message = f"the device_idx are {indices}, expected 0 to {len(indices) - 1}, each once; is a"
        return group.broken("group-members", f"{message} member missing?", odd)
    if len(indices) < 2:
        return group.broken("group-members", "it has one member, expected two or more")
    if group.members[0].kind == "recv":
        return group.broken("group-members", "device_idx is 0 for the send and 1 for the recv")
    devices = [task.device for task in group.members]
    for i, device in enumerate(devices):
        if device in devices[:i]:
            return group.broken("group-members", f"two members are on device {device!r}", i)
        key = COMMUNICATION[group.members[i].kind].root
        root = devices[0] if key is None else (group.members[i].metadata or {})[key]
        if root not in devices:
            return group.broken("group-members", f"{key} {root!r} is no member's device", i)
    return None


def check_metadata(index: Connections, group: CommunicationGroup) -> Finding:
    """The members have one metadata, phase and stage; a message may arrive in a later phase."""
    first = group.members[0]
    for i, task in enumerate(group.members):
        message = None
        if task.metadata != first.metadata:
            message = f"metadata is {task.metadata} here and {first.metadata} on {group.tasks[0]!r}"
        elif first.kind == "send":
            order, sent = MICROBATCH_PHASES, first.phase
            later = order[order.index(sent) :] if sent in order else (sent,)
            if task.phase not in later:
                message = f"it is received in phase {task.phase}, but sent in phase {sent}"
        elif (task.phase, task.stage) != (first.phase, first.stage):
            here, there = _when(task), _when(first)
            message = f"the supertask runs in {here}, {group.tasks[0]!r} in {there}"
        if message is not None:
            return group.broken("group-metadata", message, i)
    return None


def _when(task: SuperTask) -> str:
    stage = "" if task.stage is None else f" of stage {task.stage}"
    return f"phase {task.phase}{stage}"


def check_dtypes(index: Connections, group: CommunicationGroup) -> Finding:
    """The tensors have one dtype, which can be reduced so."""
    dtype = (group.inputs or group.outputs)[0].dtype
    for member, name, info in group.tensors():
        if info.dtype != dtype:
            message = f"the tensor is {info.dtype}, others {dtype}"
            return group.broken("group-dtype", message, member, name)
    operator = str((group.members[0].metadata or {}).get("reduce_op"))
    if dtype in UNDEFINED.get(operator, ()):
        message = f"{operator} of {dtype} is not defined; use sum, or convert to a float first"
        return group.broken("group-dtype", message)
    return None


def check_shapes(index: Connections, group: CommunicationGroup) -> Finding:
    """The tensors have the shapes that follow from the kind, larger pieces first."""
    if (found := _bad_dim(group)) is not None:
        return found
    for side, expected in zip(("inputs", "outputs"), _shapes(group), strict=True):
        having = [(i, task) for i, task in enumerate(group.members) if getattr(task, side)]
        for (i, task), shape in zip(having, expected, strict=True):
            (name,) = getattr(task, side)
            found_shape = group.document.tensors[name].shape
            if any(want not in (-1, size) for size, want in zip(found_shape, shape, strict=True)):
                sizes = ", ".join("any" if size == -1 else str(size) for size in shape)
                return group.wrong_shape(i, name, f"[{sizes}]")
    for side, dim in (("outputs", group.cut), ("inputs", group.join)):
        if dim is None:
            continue
        names = [getattr(task, side)[0] for task in group.members]
        sizes_there = [group.document.tensors[name].shape[dim] for name in names]
        for i, (before, size) in enumerate(pairwise(sizes_there), start=1):
            if size > before:
                expected_order = f"larger pieces first, found {sizes_there} in dimension {dim}"
                return group.wrong_shape(i, names[i], expected_order)
    return None


def _bad_dim(group: CommunicationGroup) -> Finding:
    """A tensor of another number of dimensions, or metadata that names one beyond them."""
    ndim = len((group.inputs or group.outputs)[0].shape)
    for member, name, info in group.tensors():
        if len(info.shape) != ndim:
            return group.wrong_shape(member, name, f"of {ndim} dimensions, as the others are")
    for key, dim in ((group.row.cut, group.cut), (group.row.join, group.join)):
        if dim is not None and dim >= ndim:
            message = f"{key} is {dim}, but the tensors have {ndim} dimensions"
            return group.broken("group-shape", message)
    return None


# --- shapes, by kind -------------------------------------------------------------------------


def _shapes(group: CommunicationGroup) -> Shapes:
    """The shape that each input must have, and each output.

    All are the same but along two dimensions: that of ``cut`` is in an input as long as in all
    outputs together, and that of ``join`` in an output as long as in all inputs together.
    """
    cut, join = group.cut, group.join
    given = made = group.inputs[0].shape
    if cut is not None and cut == join:
        return _shapes_along_one(group, cut)
    if cut is not None:
        size = sum(info.shape[cut] for info in group.outputs)
        given, made = _with(given, cut, size), _with(made, cut, -1)
    if join is not None:
        size = sum(info.shape[join] for info in group.inputs)
        given, made = _with(given, join, -1), _with(made, join, size)
    return [given] * len(group.inputs), [made] * len(group.outputs)


def _shapes_along_one(group: CommunicationGroup, dim: int) -> Shapes:
    """Each input is cut as evenly as can be, and the pieces are joined along the same dimension."""
    first, count = group.inputs[0].shape, len(group.tasks)
    pieces = [even_sizes(info.shape[dim], count) for info in group.inputs]
    received = [sum(sizes) for sizes in zip(*pieces, strict=True)]
    return [_with(first, dim, -1)] * count, [_with(first, dim, size) for size in received]


def _with(shape: Shape, dim: int, size: int) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])
