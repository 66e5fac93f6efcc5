"""What a worker asks of a transport: start a communication, and learn when it is over.

An `Operation` is one communication of a group, the same on every rank, so that each member knows
the sizes of all others without asking; a pair of send and recv is one operation of two members.
Member ``i`` is the task with ``device_idx`` ``i``; its rank is the position of its device in
``Document.devices``; tags number the groups in the order of their names.

`Transport.start` takes this member's tensor and returns a `PendingTransfer`; nothing blocks. A
worker asks ``ready`` and does other work meanwhile. With nothing to do it sleeps in `wait`,
until an answer may have changed or its wakeup descriptor is readable, which other threads make it
(``notify``).

Operations are told apart by group and call, so several may be under way at once. A worker starts
those of one group in the order of their calls; of different groups it starts what is there first,
so two members may start them in different orders, and none may wait for another to be taken. A
transport with ``in_order`` needs more: each member starts its operations in the file's order, one
call after the other.
"""

from __future__ import annotations

import math
import select
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from shardwright.communication import COMMUNICATION, CommunicationRow, even_sizes
from shardwright.ir.tensor_meta import contiguous_strides, torch_dtype
from shardwright.pipeline.schema import Document, SuperTask, TensorInfo

Notify = Callable[[], None]


class Interval(NamedTuple):
    """From when to when something took place, in seconds of `time.monotonic`."""

    start: float
    end: float


class PendingTransfer(ABC):
    """A member's part in one communication that has been started."""

    @abstractmethod
    def ready(self) -> bool:
        """Whether `result` is there. Raises what went wrong, WorkerError where a peer is gone."""

    @abstractmethod
    def result(self) -> Tensor | None:
        """What the member gets, None where it gets nothing; once, and only when `ready`.

        Only to be read: other members may have the same memory.
        """

    @abstractmethod
    def interval(self) -> Interval | None:
        """When bytes were on their way; None as long as some that the member sends still are."""


class Transport(ABC):
    """Moves tensors between the members of operations."""

    in_order: bool = False

    @abstractmethod
    def start(self, membership: Membership, call: int, tensor: Tensor | None) -> PendingTransfer:
        """Take part in an operation of a call with what the member gives, None for nothing."""

    def wait(self, wakeup: int, timeout: float | None) -> bool:
        """Sleep until some transfer may have become ready or ``wakeup``, a descriptor, is readable.

        False where nothing of that happened for ``timeout`` seconds; None is for ever.
        """
        poll = select.poll()
        poll.register(wakeup, select.POLLIN)
        return bool(poll.poll(None if timeout is None else 1e3 * timeout))

    @abstractmethod
    def close(self) -> None:
        """Let go of connections and threads; waits for nothing but what is already on its way."""

    @abstractmethod
    def abort(self) -> None:
        """Cut the connections at once, so that those that wait for this member fail."""


@dataclass(frozen=True)
class Operation:
    """A communication: who takes part, what each gives and gets, and how it is combined.

    kind
        A communication kind of the format; ``send`` for a pair of send and recv.
    tag
        The group's number, unique in the pipeline.
    ranks, tasks, inputs, outputs
        One entry a member. ``inputs[i]`` is None where member ``i`` gives nothing, ``outputs[i]``
        where it gets nothing.
    metadata
        The format's, as the kind says.
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
    metadata: Mapping[str, int | str] = field(default_factory=dict)
    root: int | None = None

    @property
    def size(self) -> int:
        """How many members."""
        return len(self.ranks)

    @cached_property
    def row(self) -> CommunicationRow:
        """What its kind is."""
        return COMMUNICATION[self.kind]

    @property
    def reduce_op(self) -> str:
        """How it reduces."""
        return str(self.metadata["reduce_op"])

    @cached_property
    def cut(self) -> int | None:
        """The dimension along which what members give is cut, a piece for each member."""
        return self._dim(self.row.cut)

    @cached_property
    def join(self) -> int | None:
        """The dimension along which a member joins what it gets."""
        return self._dim(self.row.join)

    def _dim(self, key: str | None) -> int | None:
        return None if key is None else int(self.metadata[key])

    @cached_property
    def givers(self) -> Sequence[int]:
        """The members that give something."""
        return [member for member, spec in enumerate(self.inputs) if spec is not None]

    @cached_property
    def receivers(self) -> Sequence[int]:
        """The members that get something."""
        return [member for member, spec in enumerate(self.outputs) if spec is not None]

    @cached_property
    def pieces(self) -> Mapping[int, Sequence[TensorSpec]]:
        """By member that gives something, the piece that each member gets of it, on its way."""
        return {giver: self._pieces(giver) for giver in self.givers}

    def _pieces(self, giver: int) -> Sequence[TensorSpec]:
        """Receivers' sizes say how a tensor is cut, except where pieces are joined along the
        dimension they were cut in: there each giver cuts as evenly as can be.
        """
        if self.kind == "send":  # As the receiver declares it, so that it need not be copied there.
            return (self.gotten(1),) * self.size
        given, dim = self.given(giver), self.cut
        if dim is None:
            return (given.contiguous,) * self.size
        if dim == self.join:
            sizes = even_sizes(given.shape[dim], self.size)
        else:
            sizes = [self.gotten(member).shape[dim] for member in range(self.size)]
        shapes = ((*given.shape[:dim], size, *given.shape[dim + 1 :]) for size in sizes)
        return [contiguous_spec(shape, given.dtype) for shape in shapes]

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
    root = COMMUNICATION[members[0].kind].root
    return Operation(
        kind=members[0].kind,
        group=group,
        tag=tag,
        ranks=tuple(list(document.devices).index(str(slot)) for slot in slots),
        tasks=tuple(ordered),
        inputs=tuple(_spec(document, task.inputs) for task in members),
        outputs=tuple(_spec(document, task.outputs) for task in members),
        metadata=metadata,
        root=slots.index(str(metadata[root])) if root is not None else None,
    )


def _spec(document: Document, names: tuple[str, ...]) -> TensorSpec | None:
    return TensorSpec.of(document.tensors[names[0]]) if names else None


@dataclass(frozen=True)
class TensorSpec:
    """Shape, dtype and layout of a tensor; ``strides`` in elements, None where contiguous."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...] | None = None

    @classmethod
    def of(cls, info: TensorInfo) -> TensorSpec:
        """The spec of a pipeline's tensor."""
        return cls(info.shape, torch_dtype(info.dtype), info.strides)

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """The strides, those of a contiguous tensor where it names none."""
        return contiguous_strides(self.shape) if self.strides is None else self.strides

    @cached_property
    def span(self) -> int:
        """Elements from the first to the last in memory, both included."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, self.steps, strict=True))

    @cached_property
    def overlaps(self) -> bool:
        """Whether two indices may share an element."""
        return _overlap(self.steps, self.shape)

    @cached_property
    def has_gaps(self) -> bool:
        """Whether there is memory between the elements that is not theirs."""
        return self.span > math.prod(self.shape) and not self.overlaps

    @cached_property
    def nbytes(self) -> int:
        """The bytes that travel: the memory from the first to the last element, without gaps."""
        elements = math.prod(self.shape) if self.has_gaps else self.span
        return elements * self.dtype.itemsize

    @cached_property
    def contiguous(self) -> TensorSpec:
        """The spec of the same tensor laid out contiguously."""
        return contiguous_spec(self.shape, self.dtype)


@lru_cache(maxsize=4096)
def contiguous_spec(shape: tuple[int, ...], dtype: torch.dtype) -> TensorSpec:
    """The spec of a contiguous tensor: the same each time, with all that was worked out of it."""
    return TensorSpec(tuple(shape), dtype)


def _overlap(strides: Sequence[int], shape: Sequence[int]) -> bool:
    reach = 0
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False
