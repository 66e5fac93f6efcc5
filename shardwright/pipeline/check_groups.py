"""Rules of communication groups: each one is complete, and its tensors fit together.

A group is one communication: its supertasks run at once, one on each device, in the order of
``device_idx``. Sizes of uneven pieces are those of the members' tensors, larger pieces first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from shardwright.errors import PipelineError
from shardwright.pipeline.connections import Connections
from shardwright.pipeline.rules import COMPUTE_KINDS, MICROBATCH_PHASES, UNDEFINED, broken
from shardwright.pipeline.schema import Document, SuperTask, TensorInfo

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CommunicationGroup:
    """One communication: its members by ``device_idx``, with the tensors that each has."""

    name: str
    document: Document
    tasks: tuple[str, ...]

    @property
    def members(self) -> list[SuperTask]:
        """The supertasks."""
        return [self.document.supertasks[task] for task in self.tasks]

    @property
    def inputs(self) -> list[TensorInfo]:
        """The input of each member that has one."""
        return [self.document.tensors[name] for m in self.members for name in m.inputs]

    @property
    def outputs(self) -> list[TensorInfo]:
        """The output of each member that has one."""
        return [self.document.tensors[name] for m in self.members for name in m.outputs]

    def dim(self, key: str) -> int:
        """A dimension of the group's metadata."""
        assert self.members[0].metadata is not None
        return int(self.members[0].metadata[key])

    def broken(self, rule: str, message: str, member: int = 0) -> PipelineError:
        """The error for a rule that this member breaks."""
        task = self.members[member]
        tensor = next(iter((*task.inputs, *task.outputs)), None)
        return broken(
            rule, f"group {self.name!r}: {message}", task=self.tasks[member], tensor=tensor
        )


def check_groups(document: Document, connections: Connections) -> None:
    """Every group is one whole communication."""
    for name, tasks in connections.groups.items():
        group = CommunicationGroup(name, document, tuple(tasks))
        for check in (
            _check_kinds,
            _check_members,
            _check_metadata,
            _check_dtypes,
            _check_dims,
            _check_shapes,
        ):
            check(group)


def _check_kinds(group: CommunicationGroup) -> None:
    kinds = [task.kind for task in group.members]
    pair = {"send", "recv"}
    if pair.isdisjoint(kinds):
        if len(set(kinds)) > 1:
            odd = next(i for i, kind in enumerate(kinds) if kind != kinds[0])
            raise group.broken(
                "group-kind", f"it holds {kinds[0]} and {kinds[odd]}; one kind a group", odd
            )
    elif sorted(kinds) != ["recv", "send"]:
        raise group.broken(
            "group-kind", f"it holds {', '.join(kinds)}; expected one send and one recv"
        )


def _check_members(group: CommunicationGroup) -> None:
    indices = [task.device_idx for task in group.members]
    if indices != list(range(len(indices))):
        odd = next(i for i, index in enumerate(indices) if index != i)
        raise group.broken(
            "group-members",
            f"the device_idx are {indices}, expected 0 to {len(indices) - 1}, each once; is a "
            "member missing?",
            odd,
        )
    if len(indices) < 2:
        raise group.broken("group-members", "it has one member, expected two or more")
    if group.members[0].kind == "recv":
        raise group.broken("group-members", "device_idx is 0 for the send and 1 for the recv")
    devices = [task.device for task in group.members]
    for i, device in enumerate(devices):
        if device in devices[:i]:
            raise group.broken("group-members", f"two members are on device {device!r}", i)
        for key in ("src", "dst"):
            root = (group.members[i].metadata or {}).get(key, devices[0])
            if root not in devices:
                raise group.broken("group-members", f"{key} {root!r} is no member's device", i)


def _check_metadata(group: CommunicationGroup) -> None:
    first = group.members[0]
    for i, task in enumerate(group.members):
        if task.metadata != first.metadata:
            raise group.broken(
                "group-metadata",
                f"metadata is {task.metadata} here and {first.metadata} on {group.tasks[0]!r}",
                i,
            )
    if first.kind == "send":
        _check_message(group)
        return
    for i, task in enumerate(group.members):
        if (task.phase, task.stage) != (first.phase, first.stage):
            raise group.broken(
                "group-metadata",
                f"the supertask runs in {_when(task)}, {group.tasks[0]!r} in {_when(first)}",
                i,
            )


def _check_message(group: CommunicationGroup) -> None:
    """A message arrives in the phase in which it was sent, or later in the same microbatch."""
    send, recv = group.members
    steps = [
        MICROBATCH_PHASES.index(task.phase) if task.phase in MICROBATCH_PHASES else None
        for task in (send, recv)
    ]
    onward = steps[0] is not None and steps[1] is not None and steps[0] < steps[1]
    if send.phase != recv.phase and not onward:
        raise group.broken(
            "group-metadata",
            f"it is received in phase {recv.phase}, but sent in phase {send.phase}",
            1,
        )


def _when(task: SuperTask) -> str:
    stage = "" if task.stage is None else f" of stage {task.stage}"
    return f"phase {task.phase}{stage}"


def _check_dtypes(group: CommunicationGroup) -> None:
    tensors = group.document.tensors
    dtype = (group.inputs or group.outputs)[0].dtype
    for i, task in enumerate(group.members):
        for name in (*task.inputs, *task.outputs):
            if tensors[name].dtype != dtype:
                raise broken(
                    "group-dtype",
                    f"group {group.name!r}: the tensor is {tensors[name].dtype}, others {dtype}",
                    task=group.tasks[i],
                    tensor=name,
                )
    operator = str((group.members[0].metadata or {}).get("reduce_op"))
    if dtype in UNDEFINED.get(operator, ()):
        raise group.broken(
            "group-dtype",
            f"{operator} of {dtype} is not defined; use sum, or convert to a float first",
        )


def _check_dims(group: CommunicationGroup) -> None:
    ndim = len((group.inputs or group.outputs)[0].shape)
    for i, task in enumerate(group.members):
        for name in (*task.inputs, *task.outputs):
            if len(group.document.tensors[name].shape) != ndim:
                raise _shape_error(group, i, name, f"of {ndim} dimensions, as the others are")
    for key in ("dim", "src_dim", "dst_dim"):
        if key in (group.members[0].metadata or {}) and group.dim(key) >= ndim:
            raise group.broken(
                "group-shape", f"{key} is {group.dim(key)}, but the tensors have {ndim} dimensions"
            )


def _shape_error(
    group: CommunicationGroup, member: int, tensor: str, expected: str
) -> PipelineError:
    info = group.document.tensors[tensor]
    kind = group.members[member].kind
    return broken(
        "group-shape",
        f"group {group.name!r}: {kind} has the shape {list(info.shape)} here, expected {expected}",
        task=group.tasks[member],
        tensor=tensor,
    )


# --- shapes, by kind -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GroupShapes:
    """What a kind of communication makes of shapes.

    ``expected`` gives, from the group, the shape that each member's input must have and that each
    member's output must have; a -1 stands where any size does. ``pieces`` names the side whose
    sizes along ``dim`` must not grow.
    """

    expected: Callable[[CommunicationGroup], tuple[Sequence[Shape], Sequence[Shape]]]
    pieces: tuple[tuple[str, str], ...] = ()


def _all_alike(group: CommunicationGroup) -> tuple[Sequence[Shape], Sequence[Shape]]:
    shape = group.inputs[0].shape
    return [shape] * len(group.inputs), [shape] * len(group.outputs)


def _gathered(group: CommunicationGroup) -> tuple[Sequence[Shape], Sequence[Shape]]:
    dim = group.dim("dim")
    inputs = [info.shape for info in group.inputs]
    whole = _with(inputs[0], dim, sum(shape[dim] for shape in inputs))
    return [_with(inputs[0], dim, -1)] * len(inputs), [whole] * len(inputs)


def _scattered(group: CommunicationGroup) -> tuple[Sequence[Shape], Sequence[Shape]]:
    dim = group.dim("dim")
    outputs = [info.shape for info in group.outputs]
    whole = _with(group.inputs[0].shape, dim, sum(shape[dim] for shape in outputs))
    return [whole] * len(outputs), [_with(whole, dim, -1)] * len(outputs)


def _exchanged(group: CommunicationGroup) -> tuple[Sequence[Shape], Sequence[Shape]]:
    """Input i holds piece i of ``dst_dim`` and all of ``src_dim``; output i the mirror."""
    src, dst = group.dim("src_dim"), group.dim("dst_dim")
    if src == dst:
        return _exchanged_in_place(group, src)
    first = group.inputs[0].shape
    src_size = sum(info.shape[src] for info in group.outputs)
    dst_size = sum(info.shape[dst] for info in group.inputs)
    inputs = _with(_with(first, src, src_size), dst, -1)
    outputs = _with(_with(first, dst, dst_size), src, -1)
    return [inputs] * len(group.tasks), [outputs] * len(group.tasks)


def _exchanged_in_place(
    group: CommunicationGroup, dim: int
) -> tuple[Sequence[Shape], Sequence[Shape]]:
    """Split and joined along one dimension: each input is cut as evenly as can be."""
    count = len(group.tasks)
    first = group.inputs[0].shape
    sizes = [info.shape[dim] for info in group.inputs]
    received = [sum(size // count + (i < size % count) for size in sizes) for i in range(count)]
    return [_with(first, dim, -1)] * count, [_with(first, dim, size) for size in received]


def _with(shape: Shape, dim: int, size: int) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])


SHAPES: dict[str, GroupShapes] = {
    "send": GroupShapes(_all_alike),
    "reduce": GroupShapes(_all_alike),
    "broadcast": GroupShapes(_all_alike),
    "all_reduce": GroupShapes(_all_alike),
    "all_gather": GroupShapes(_gathered, (("inputs", "dim"),)),
    "reduce_scatter": GroupShapes(_scattered, (("outputs", "dim"),)),
    "all_to_all": GroupShapes(_exchanged, (("outputs", "src_dim"), ("inputs", "dst_dim"))),
}


def _check_shapes(group: CommunicationGroup) -> None:
    row = SHAPES[group.members[0].kind]
    for side, shapes in zip(("inputs", "outputs"), row.expected(group), strict=True):
        expected = iter(shapes)
        for i, task in enumerate(group.members):
            for tensor in getattr(task, side):
                _check_shape(group, i, tensor, next(expected))
    for side, key in row.pieces:
        _check_pieces(group, side, group.dim(key))


def _check_shape(group: CommunicationGroup, member: int, tensor: str, expected: Shape) -> None:
    found = group.document.tensors[tensor].shape
    if any(want not in (-1, size) for size, want in zip(found, expected, strict=True)):
        sizes = ", ".join("any" if size == -1 else str(size) for size in expected)
        raise _shape_error(group, member, tensor, f"[{sizes}]")


def _check_pieces(group: CommunicationGroup, side: str, dim: int) -> None:
    names = [getattr(task, side)[0] for task in group.members]
    sizes = [group.document.tensors[name].shape[dim] for name in names]
    for i in range(1, len(sizes)):
        if sizes[i] > sizes[i - 1]:
            raise _shape_error(
                group, i, names[i], f"larger pieces first, found {sizes} in dimension {dim}"
            )


# --- state ----------------------------------------------------------------------------------------
#
# A tensor that nothing reads, that is given out nowhere and replaces nothing is an update that was
# forgotten; so is one of several parts of a state of which the others are replaced.


_REMEDY = "name the constant that it becomes in training.replaces"


def check_landing(document: Document, connections: Connections) -> None:
    """Each update lands, on every device that holds a part of the state."""
    if document.training is not None:
        _check_made(document, connections)
        _check_parts(document)


def _check_made(document: Document, connections: Connections) -> None:
    assert document.training is not None
    for made, each in _made(document, connections):
        lost = [t for t in made if t not in connections.users and not _replaces(document, t)]
        if lost and (each or len(lost) == len(made)):
            raise broken(
                "lands",
                f"nothing reads the tensor, and it replaces no constant; {_REMEDY}, or leave it "
                "out of what is made",
                task=connections.producers[lost[0]][0],
                tensor=lost[0],
            )


def _replaces(document: Document, tensor: str) -> bool:
    return document.training is not None and tensor in document.training.replaces


def _made(document: Document, connections: Connections) -> Iterator[tuple[Sequence[str], bool]]:
    """What a graph makes, each for something, and what a group makes, of which something is."""
    for task in document.supertasks.values():
        if task.kind in COMPUTE_KINDS:
            yield task.outputs, True
    for members in connections.groups.values():
        yield [made for name in members for made in document.supertasks[name].outputs], False


def _check_parts(document: Document) -> None:
    """Of a state that has a name, all parts and copies are replaced or none."""
    assert document.training is not None
    replaced = {*document.training.replaces.values()}
    parts: dict[tuple[str, str], list[str]] = {}
    for tensor, info in document.tensors.items():
        if (name := _name(info)) is not None:
            parts.setdefault(name, []).append(tensor)
    for tensors in parts.values():
        kept = [tensor for tensor in tensors if tensor not in replaced]
        if kept and len(kept) < len(tensors):
            other = next(tensor for tensor in tensors if tensor in replaced)
            raise broken(
                "lands",
                f"the constant is not replaced, but {other!r}, which is of the same state, is; a "
                "state changes on every device that holds a part of it",
                tensor=kept[0],
            )


def _name(info: TensorInfo) -> tuple[str, str] | None:
    """What the state is called whose part a constant is."""
    if info.value is not None:
        return info.value.path, info.value.name
    return ("", info.origin.name) if info.origin is not None else None
