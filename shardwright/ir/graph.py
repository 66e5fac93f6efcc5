"""IRGraph: values and nodes, one node an operator call.

A graph is functional and flat: no operator in it writes to an input, none calls a subgraph, and
an in-place write of the program is a new value. `Builder` writes graphs; everything else reads
them. What always holds is what `validate` checks: each value has at most one producer, is defined
before it is used, has a shape and a dtype, and knows its users.

How a node's call is stored
    ``inputs`` are the tensors: first those that stand alone in the operator's schema, in its
    order, then those inside lists, in its order. ``attrs`` maps every other argument of the
    schema to its value, defaults written out. In a list that holds tensors the k-th input stands
    as ``Input(k)``, so ``aten.index_put.default(x, [None, i], v)`` has inputs (x, v, i) and attrs
    ``{"indices": [None, Input(2)], "accumulate": False}``. A device argument is ``SLOT``: the
    graph names no device, the slot that runs it supplies one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from shardwright.errors import GraphError
from shardwright.ir.dtypes import itemsize

if TYPE_CHECKING:
    import torch

    from shardwright.ir.structure import Arguments, Tree

Role = Literal["input", "param", "buffer", "state", "constant", "tmp", "output"]
STORED_ROLES: tuple[Role, ...] = ("param", "buffer", "state", "constant")
"""Roles of values that exist before a run and whose contents live outside the graph."""


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
    producer: int | None = None
    users: list[int] = field(default_factory=list)

    @property
    def numel(self) -> int:
        """How many elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """How many bytes the elements take."""
        return self.numel * itemsize(self.dtype)

    @property
    def is_stored(self) -> bool:
        """Whether the contents come from a checkpoint rather than from an input or a node."""
        return self.role in STORED_ROLES


@dataclass(slots=True)
class IRNode:
    """One operator call; the module's docstring says how arguments are stored.

    op
        The full name of an overload, ``aten.linear.default``, or a marker such as ``Backward``.
    scopes
        The modules around the call, outermost first, the root model left out.
    source
        The line of the program it came from, where known.
    """

    id: int
    op: str
    inputs: list[int]
    outputs: list[int]
    attrs: dict[str, Any]
    scopes: tuple[Scope, ...] = ()
    source: Source | None = None

    @property
    def scope(self) -> str:
        """The path of the innermost module, ``""`` for the root."""
        return self.scopes[-1].path if self.scopes else ""

    @property
    def scope_class(self) -> str:
        """The class of the innermost module, ``""`` where there is none."""
        return self.scopes[-1].cls if self.scopes else ""


@dataclass(slots=True)
class IRGraph:
    """Values and nodes in execution order.

    inputs
        Value ids, in the order of the leaves of ``in_structure``.
    outputs
        Value ids, in the order of the leaves of ``out_structure``; a value may stand twice, and
        may be an input or stored.
    updates
        Stored value id to the id of the value that replaces it after a run: buffers that the
        program changed in place.
    tensors
        Contents of stored values by value id; on the meta device where nothing was loaded. Not
        part of a graph's equality.
    """

    name: str
    values: dict[int, IRValue] = field(default_factory=dict)
    nodes: list[IRNode] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    updates: dict[int, int] = field(default_factory=dict)
    in_structure: Arguments | None = None
    out_structure: Tree | None = None
    tensors: dict[int, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)
    next_id: int = field(default=0, compare=False)

    def new_value(
        self,
        name: str,
        shape: Sequence[int],
        dtype: str,
        *,
        device: str = "cpu",
        role: Role = "tmp",
        strides: Sequence[int] | None = None,
        names: Sequence[str] = (),
        placements: Sequence[tuple[int, int]] | None = None,
    ) -> IRValue:
        """Add a value under a fresh id and, where ``name`` is taken, under ``name__k``."""
        value = IRValue(
            id=self.fresh_id(),
            name=self._free_name(name),
            shape=tuple(shape),
            dtype=dtype,
            device=device,
            role=role,
            strides=_strides_or_none(shape, strides),
            names=tuple(names),
            placements=tuple(placements) if placements is not None else None,
        )
        self._names.add(value.name)
        self.values[value.id] = value
        return value

    def emit(
        self,
        op: str,
        inputs: Sequence[int],
        outputs: Sequence[int],
        attrs: dict[str, Any] | None = None,
        *,
        scopes: tuple[Scope, ...] = (),
        source: Source | None = None,
    ) -> IRNode:
        """Append a call of ``op`` that reads and makes the given values. Raises GraphError."""
        node = IRNode(
            self.fresh_id(), op, list(inputs), list(outputs), dict(attrs or {}), scopes, source
        )
        for value_id in node.outputs:
            if self.values[value_id].producer is not None:
                raise GraphError(f"value %{self.values[value_id].name} already has a producer")
            self.values[value_id].producer = node.id
        for value_id in dict.fromkeys(node.inputs):
            self.values[value_id].users.append(node.id)
        self.nodes.append(node)
        return node

    def fresh_id(self) -> int:
        """The next unused id; values and nodes share one count."""
        self.next_id += 1
        return self.next_id - 1

    def node_by_id(self) -> dict[int, IRNode]:
        """Nodes by id."""
        return {node.id: node for node in self.nodes}

    def stored(self) -> Iterator[IRValue]:
        """Parameters, buffers, state and constants, in the order of their ids."""
        return (value for value in self.values.values() if value.is_stored)

    _taken: set[str] | None = field(default=None, compare=False, repr=False)

    @property
    def _names(self) -> set[str]:
        if self._taken is None:
            self._taken = {value.name for value in self.values.values()}
        return self._taken

    def _free_name(self, wanted: str) -> str:
        if wanted not in self._names:
            return wanted
        k = 1
        while f"{wanted}__{k}" in self._names:
            k += 1
        return f"{wanted}__{k}"


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides in elements of a contiguous tensor of this shape."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _strides_or_none(
    shape: Sequence[int], strides: Sequence[int] | None
) -> tuple[int, ...] | None:
    """None where ``strides`` order the elements as a contiguous tensor does."""
    if strides is None:
        return None
    expected = contiguous_strides(shape)
    differs = any(
        size > 1 and found != want
        for size, found, want in zip(shape, strides, expected, strict=True)
    )
    return tuple(strides) if differs and math.prod(shape) > 0 else None
