"""IRValue and IRNode: one tensor, one operator call.

How a node's call is stored
    ``inputs`` are the tensors: first those that stand alone in the operator's schema, in its
    order, then those inside lists, in its order. ``attrs`` maps every other argument of the
    schema to its value, defaults written out. In a list that holds tensors the k-th input stands
    as ``Input(k)``, so ``aten.index_put.default(x, [None, i], v)`` has inputs (x, v, i) and attrs
    ``{"indices": [None, Input(2)], "accumulate": False}``. A device argument is ``SLOT``: the
    graph names no device, the slot that runs it supplies one.

    ``outputs`` are the tensors that the call returns. Places among its results that hold none are
    listed in ``absent``: an operator with an output mask returns None where the mask is False.
    ``results`` shows both, ``[a, None, c]`` for outputs (a, c) and absent (1,).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

from shardwright.ir.dtypes import itemsize

T = TypeVar("T")

Role = Literal["input", "param", "buffer", "state", "constant", "tmp", "output"]
STORED_ROLES: tuple[Role, ...] = ("param", "buffer", "state", "constant")
"""Roles of values that exist before a run and whose contents live outside the graph."""

Init = Literal["zeros"]
"""What a stored value holds before the first run, where no contents exist."""


@dataclass(frozen=True, slots=True)
class Input:
    """Inside a list of `IRNode.attrs`: the node's input number ``index`` stands here."""

    index: int


@dataclass(frozen=True, slots=True)
class _Slot:
    """The type of `SLOT`."""

    def __repr__(self) -> str:
        return "SLOT"


SLOT = _Slot()
"""A device argument: the device of whatever slot runs the node."""


class Scope(NamedTuple):
    """A module on the way to a node: its path (``layers.0.mlp``) and its class's qualified name."""

    path: str
    cls: str


class Source(NamedTuple):
    """The line of the program that made a node."""

    file: str
    line: int


@dataclass(slots=True)
class IRValue:
    """One tensor: its identity, never its contents.

    shape
        Sizes, one a dimension; static.
    dtype
        A short name of `shardwright.ir.dtypes.DTYPES`.
    device
        Where the program had it; texts show it, nothing depends on it.
    strides
        In elements, one a dimension; None where the tensor is contiguous.
    names
        For stored roles, the names under which a checkpoint may hold it, the first one leading;
        tied parameters have several.
    placements
        For stored roles, the half-open range taken of each dimension of the stored tensor; None
        where the value is all of it.
    init
        For stored roles, what the value holds before the first run where nothing stores it:
        ``"zeros"`` for state that does not exist yet; None where contents exist.
    persistent
        Whether a checkpoint of the program holds it; not so for some buffers. Not part of a
        value's equality.
    batched
        For inputs of one microbatch, whether it is cut from the batch along the first dimension;
        None where nobody said. Not part of a value's equality.
    producer, users
        Node ids. A value without a producer is an input or stored.
    """

    id: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    device: str = "cpu"
    role: Role = "tmp"
    strides: tuple[int, ...] | None = None
    names: tuple[str, ...] = ()
    placements: tuple[tuple[int, int], ...] | None = None
    init: Init | None = None
    producer: int | None = None
    users: list[int] = field(default_factory=list)
    persistent: bool = field(default=True, compare=False, repr=False)
    batched: bool | None = field(default=None, compare=False, repr=False)

    def wired(self, producer: int | None, users: list[int]) -> IRValue:
        """The value between other nodes, all else the same; `dataclasses.replace` would be slow."""
        return IRValue(
            self.id,
            self.name,
            self.shape,
            self.dtype,
            self.device,
            self.role,
            self.strides,
            self.names,
            self.placements,
            self.init,
            producer,
            users,
            self.persistent,
            self.batched,
        )

    @property
    def numel(self) -> int:
        """How many elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """How many bytes the elements take."""
        return math.prod(self.shape) * itemsize(self.dtype)

    @property
    def is_stored(self) -> bool:
        """Whether the contents come from a checkpoint rather than from an input or a node."""
        return self.role in STORED_ROLES


class Temp(NamedTuple):
    """A tensor between two kernel calls of one node."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Emitted:
    """One kernel call of a node as a backend's emitter wrote it; the call's fields never change.

    kind_id, attr_schema, attr_blob
        Which kernel, and its packed constants (`shardwright.kernels.kinds`); None where an emitter
        left them empty, which lowering refuses.
    inputs, outputs
        Operands by place: the node's inputs count from 0, its outputs follow, then the tensors
        between its calls; -1 is an optional operand that is not there.
    temps
        The tensors between the node's calls that this call makes.
    constraints, hints
        Words for the planner (`shardwright.kernels.constraints`): what must hold of the call, and
        what is good to know.
    saved
        Places whose values stay where they lie until the run has ended, for a backward that is not
        part of the graph: nothing is written over them.
    """

    kind_id: int | None = None
    attr_schema: int | None = None
    attr_blob: bytes | None = None
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    temps: tuple[Temp, ...] = ()
    constraints: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    saved: tuple[int, ...] = ()


@dataclass(slots=True)
class IRNode:
    """One operator call; the module's docstring says how arguments are stored.

    op
        The full name of an overload, ``aten.linear.default``, or a marker such as ``Backward``.
    scopes
        The modules around the call, outermost first, the root model left out.
    source
        The line of the program it came from, where known.
    absent
        Places among the operator's results that hold no tensor, ascending.
    emitted
        The kernel calls that do the node's work, in order; None before an emitter ran. Not part
        of a node's equality.
    """

    id: int
    op: str
    inputs: list[int]
    outputs: list[int]
    attrs: dict[str, Any]
    scopes: tuple[Scope, ...] = ()
    source: Source | None = None
    absent: tuple[int, ...] = ()
    emitted: tuple[Emitted, ...] | None = field(default=None, compare=False, repr=False)

    @property
    def results(self) -> list[int | None]:
        """What the call returns, place by place: value ids, and None at the absent places."""
        return with_absent(self.outputs, self.absent)

    @property
    def scope(self) -> str:
        """The path of the innermost module, ``""`` for the root."""
        return self.scopes[-1].path if self.scopes else ""

    @property
    def scope_class(self) -> str:
        """The class of the innermost module, ``""`` where there is none."""
        return self.scopes[-1].cls if self.scopes else ""


def with_absent(present: Sequence[T], absent: Sequence[int]) -> list[T | None]:
    """``present`` in order, with None at the places ``absent``."""
    left = iter(present)
    return [None if i in absent else next(left) for i in range(len(present) + len(absent))]


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides in elements of a contiguous tensor of this shape."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def is_dense(shape: Sequence[int], strides: Sequence[int] | None) -> bool:
    """Whether strides only permute the dimensions of a contiguous tensor."""
    if strides is None:
        return True
    order = sorted(range(len(shape)), key=lambda i: (-strides[i], -shape[i]))
    expected = contiguous_strides([shape[i] for i in order])
    return all(shape[i] == 1 or strides[i] == want for i, want in zip(order, expected, strict=True))


def overlaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements may lie at one place."""
    if 0 in shape:
        return False
    reach = 0
    for stride, size in sorted((t, s) for t, s in zip(strides, shape, strict=True) if s > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def sent_strides(shape: Sequence[int], strides: Sequence[int] | None) -> tuple[int, ...] | None:
    """The strides that a tensor has where it arrives: its own, gaps included.

    One whose elements overlap, as an expanded one's do, arrives contiguous.
    """
    found = strides_or_none(shape, strides)
    return None if found is None or overlaps(shape, found) else found


def strides_or_none(shape: Sequence[int], strides: Sequence[int] | None) -> tuple[int, ...] | None:
    """``strides``, or None where they order the elements as a contiguous tensor does."""
    if strides is None:
        return None
    expected = contiguous_strides(shape)
    differs = any(
        size > 1 and found != want
        for size, found, want in zip(shape, strides, expected, strict=True)
    )
    return tuple(strides) if differs and math.prod(shape) > 0 else None
