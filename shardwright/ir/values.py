"""IRValue and IRNode: one tensor, one operator call.

How a node's call is stored
    ``inputs`` are the tensors: first those that are arguments by themselves in the operator's
    schema, in its order, then those inside lists, in its order. ``attrs`` maps every other argument
    of the schema to its value, defaults written out. In a list that holds tensors the k-th input is
    ``Input(k)``, so ``aten.index_put.default(x, [None, i], v)`` has inputs (x, v, i) and attrs
    ``{"indices": [None, Input(2)], "accumulate": False}``. A device argument is ``SLOT``: the graph
    names no device, the slot that runs it supplies one.

    ``outputs`` are the tensors that the call returns. Places among its results that hold none are
    listed in ``absent``: an operator with an output mask returns None where the mask is False.
    ``results`` shows both, ``[a, None, c]`` for outputs (a, c) and absent (1,).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

import torch

from shardwright.errors import GraphError
from shardwright.ir.tensor_meta import TensorMeta, dtype_name, torch_dtype

T = TypeVar("T")

Role = Literal["input", "param", "buffer", "state", "constant", "tmp", "output"]
STORED_ROLES: tuple[Role, ...] = ("param", "buffer", "state", "constant")
"""Roles of values that exist before a run and whose contents live outside the graph."""

Init = Literal["zeros"]
"""What a stored value holds before the first run, where no contents exist."""


@dataclass(frozen=True, slots=True)
class Input:
    """Inside a list of `IRNode.attrs`: the node's input number ``index``."""

    index: int


@dataclass(frozen=True, slots=True)
class _Slot:
    """The type of `SLOT`."""

    def __repr__(self) -> str:
        return "SLOT"


SLOT = _Slot()
"""A device argument: the device of whatever slot runs the node."""


class Scope(NamedTuple):
    """A module on the way to a node: its path (``layers.0.mlp``) and its class's qualified name.

    ``arguments`` are those that its class's constructor takes, by name, for a layer of torch.nn
    whose attributes say all of them; None for other modules.
    """

    path: str
    cls: str
    arguments: tuple[tuple[str, Any], ...] | None = None


class Source(NamedTuple):
    """The line of the program that made a node."""

    file: str
    line: int


@dataclass(slots=True)
class IRValue:
    """One tensor: its identity, never its contents.

    device
        Where the program had it; texts show it, nothing depends on it.
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
    meta: TensorMeta
    device: str = "cpu"
    role: Role = "tmp"
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
            self.meta,
            self.device,
            self.role,
            self.names,
            self.placements,
            self.init,
            producer,
            users,
            self.persistent,
            self.batched,
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes, one a dimension; static."""
        return self.meta.shape

    @property
    def dtype(self) -> str:
        """A short name of `tensor_meta.DTYPES`."""
        return self.meta.dtype

    @property
    def strides(self) -> tuple[int, ...] | None:
        """In elements, one a dimension; None where the tensor is contiguous."""
        return self.meta.strides

    @property
    def numel(self) -> int:
        """How many elements."""
        return self.meta.numel

    @property
    def nbytes(self) -> int:
        """How many bytes the elements take."""
        return self.meta.nbytes

    @property
    def is_stored(self) -> bool:
        """Whether the contents come from a checkpoint rather than from an input or a node."""
        return self.role in STORED_ROLES


@dataclass(frozen=True, slots=True)
class Emitted:
    """One kernel call of a node as a backend's emitter wrote it; the call's fields never change.

    kind_id, attr_schema, attr_blob
        Which kernel, and its packed constants (`shardwright.kernels.lowered`); None where an
        emitter left them empty, which lowering refuses.
    inputs, outputs
        Operands by place: the node's inputs count from 0, its outputs follow, then the tensors
        between its calls; -1 is an optional operand that is not there.
    temps
        The tensors between the node's calls that this call makes.
    constraints, hints
        Words for the planner (`shardwright.kernels.constraints`): what must hold of the call, and
        what is good to know.
    saved
        Places whose values stay in memory until the run has ended, for a backward that is not
        part of the graph: nothing is written over them.
    """

    kind_id: int | None = None
    attr_schema: int | None = None
    attr_blob: bytes | None = None
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    temps: tuple[TensorMeta, ...] = ()
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


# --- attributes as JSON, tagged where JSON has no such value --------------------------------------
#
# ``from_json(to_json(value)) == value`` for every value an attribute may have, and the JSON form
# holds no name of Python or of a private enumeration.
#
#     torch.float32             {"dtype": "f32"}
#     torch.strided             {"layout": "strided"}
#     torch.contiguous_format   {"memory_format": "contiguous_format"}
#     SLOT                      {"device": "slot"}
#     inf, -inf, nan            {"float": "inf"}, ...
#     1+2j                      {"complex": [1.0, 2.0]}
#     Input(3)                  {"input": 3}

LAYOUTS = {
    str(item).removeprefix("torch."): item
    for item in (
        torch.strided,
        torch.sparse_coo,
        torch.sparse_csr,
        torch.sparse_csc,
        torch.sparse_bsr,
        torch.sparse_bsc,
        torch.jagged,
    )
}
MEMORY_FORMATS = {
    str(item).removeprefix("torch."): item
    for item in (
        torch.contiguous_format,
        torch.preserve_format,
        torch.channels_last,
        torch.channels_last_3d,
    )
}


def is_attribute(value: Any) -> bool:
    """Whether an attribute may be this; tuples and subclasses of the plain types may not."""
    if type(value) is list:
        return all(is_attribute(item) for item in value)
    return type(value) in _KINDS


def to_json(value: Any) -> Any:
    """An attribute as plain JSON values. Raises GraphError for what an attribute cannot be."""
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, complex):
        return {"complex": [to_json(value.real), to_json(value.imag)]}
    for kind, tag, encode in _TAGS:
        if isinstance(value, kind):
            return {tag: encode(value)}
    raise GraphError(f"an attribute cannot be a {type(value).__name__}: {value!r}")


def from_json(data: Any) -> Any:
    """The attribute of JSON values. Raises GraphError."""
    if isinstance(data, list):
        return [from_json(item) for item in data]
    if not isinstance(data, dict):
        return data
    if len(data) == 1:
        ((tag, content),) = data.items()
        if tag in _DECODERS:
            return _decode(tag, content)
    raise GraphError(f"unknown tagged value {data!r}; known tags are {', '.join(_DECODERS)}")


def _decode(tag: str, content: Any) -> Any:
    try:
        return _DECODERS[tag](content)
    except (KeyError, IndexError, TypeError, ValueError):
        raise GraphError(f"{content!r} is no value of the tag {tag!r}") from None


def _slot(content: Any) -> Any:
    return {"slot": SLOT}[content]


def _short_name(value: Any) -> str:
    return str(value).removeprefix("torch.")


def _input(content: Any) -> Input:
    if type(content) is not int or content < 0:
        raise ValueError(content)
    return Input(content)


_TAGS: tuple[tuple[type, str, Callable[[Any], Any]], ...] = (
    (torch.dtype, "dtype", dtype_name),
    (torch.layout, "layout", _short_name),
    (torch.memory_format, "memory_format", _short_name),
    (type(SLOT), "device", lambda value: "slot"),
    (Input, "input", lambda value: value.index),
)
_KINDS = {type(None), bool, int, float, complex, str, *(kind for kind, _, _ in _TAGS)}
_DECODERS: dict[str, Callable[[Any], Any]] = {
    "dtype": torch_dtype,
    "layout": LAYOUTS.__getitem__,
    "memory_format": MEMORY_FORMATS.__getitem__,
    "device": _slot,
    "input": _input,
    "float": {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}.__getitem__,
    "complex": lambda parts: complex(from_json(parts[0]), from_json(parts[1])),
}
