"""Lowered graphs: flat calls on values, each with all that a kernel is told.

    lowered mlp: 2 calls
      0 gemm(%x, %w, -, -) -> %linear  transpose_b=1
      1 relu(%linear) -> %relu

A `LoweredGraph` is what `lower_graph` makes of an `IRGraph` and what a ``dfg`` supertask holds. It
says what is called, on what; where values are in memory is the `ExecPlan`'s. In its text,
attributes that have their kind's defaults are left out; behind them stand the call's own
constraints and hints, and what it saves. A call alone has its values' numbers for names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shardwright.errors import ExecError
from shardwright.ir.tensor_meta import contiguous_strides, count_text, itemsize
from shardwright.ir.values import Role
from shardwright.kernels import (
    attention,
    convolution,
    generic,
    losses,
    matmul,
    memory,
    normalization,
    optimizer,
    pointwise,
)
from shardwright.kernels.row import ABSENT, Emitter, KernelRow
from shardwright.kernels.strides import extent, same_order
from shardwright.kernels.torch_kernels import Closure, Tensors

# --- the one table of kernel kinds: what a call may be -------------------------------------------

KINDS: tuple[KernelRow, ...] = (
    *generic.ROWS,
    *memory.ROWS,
    *pointwise.ROWS,
    *matmul.ROWS,
    *normalization.ROWS,
    *attention.ROWS,
    *losses.ROWS,
    *convolution.ROWS,
    *optimizer.ROWS,
)
BY_ID: Mapping[int, KernelRow] = {kind.id: kind for kind in KINDS}
BY_NAME: Mapping[str, KernelRow] = {kind.name: kind for kind in KINDS}
EMITTERS: Mapping[str, Emitter] = {
    op: emit for kind in KINDS for op, emit in kind.from_aten.items()
}
"""By the operator's full name."""


def kind_of(kind_id: int) -> KernelRow:
    """The row of an id. Raises ExecError."""
    try:
        return BY_ID[kind_id]
    except KeyError:
        raise ExecError(f"kind {kind_id} is unknown; this version has {sorted(BY_ID)}") from None


def bind_torch(kind: str, attrs: Mapping[str, Any], ins: Tensors, outs: Tensors) -> Closure:
    """What a call of ``kind`` does, on these tensors; attributes left out have their defaults."""
    row = BY_NAME[kind]
    return row.torch({**row.attrs.defaults, **attrs}, ins, outs)


# --- graphs --------------------------------------------------------------------------------------

VIEW = BY_NAME["view"]
_SHOWN = 80
"""How many characters of a text attribute are shown."""


@dataclass(frozen=True, slots=True)
class ValueSpec:
    """One value: a slot of the executor's table.

    ``strides`` are in elements, None where the value is contiguous; ``names`` those of a
    checkpoint.
    """

    vid: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    role: Role
    strides: tuple[int, ...] | None = None
    names: tuple[str, ...] = ()

    @property
    def steps(self) -> tuple[int, ...]:
        """The strides, written out."""
        return contiguous_strides(self.shape) if self.strides is None else self.strides

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes by itself."""
        return extent(self.shape, self.steps) * itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class LoweredOp:
    """One call: a kind, its packed attributes, and the values it reads and makes.

    where
        The node it came from, for messages and traces.
    constraints, hints
        For the planner, in the words of `row.CONSTRAINTS` and `row.HINTS`.
    saved
        Values that stay in their memory until a run has ended, whether or not anyone reads them.
    """

    kind_id: int
    attr_schema: int
    attr_blob: bytes
    in_vids: tuple[int, ...]
    out_vids: tuple[int, ...]
    where: str = field(default="", compare=False)
    constraints: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    saved: tuple[int, ...] = ()

    def must(self, constraint: str) -> bool:
        """Whether it is under a constraint, its own or its kind's."""
        return constraint in self.constraints or constraint in kind_of(self.kind_id).constrains

    @property
    def reads(self) -> list[int]:
        """The values that it reads."""
        return [vid for vid in self.in_vids if vid != ABSENT]

    @property
    def makes(self) -> list[int]:
        """The values that it makes."""
        return [vid for vid in self.out_vids if vid != ABSENT]

    def __str__(self) -> str:
        return _format_call(self, str)


@dataclass(frozen=True, slots=True)
class LoweredGraph:
    """Calls in order.

    inputs, outputs
        Value ids; a value may stand twice among the outputs, and may be an input or stored.
    updates
        Stored value to the value whose contents it holds after a run.
    """

    name: str
    values: Mapping[int, ValueSpec]
    ops: tuple[LoweredOp, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    updates: Mapping[int, int] = field(default_factory=dict)

    @property
    def kept(self) -> list[int]:
        """What a run leaves: outputs, new contents of stored values, and what calls save."""
        saved = (vid for op in self.ops for vid in op.saved)
        return [*self.outputs, *self.updates.values(), *saved]

    def __str__(self) -> str:
        lines = [f"lowered {self.name}: {count_text(len(self.ops), 'call')}"]
        for index, op in enumerate(self.ops):
            lines.append(f"  {index} {_format_call(op, lambda vid: self.values[vid].name)}")
        return "\n".join(lines)


# --- text ----------------------------------------------------------------------------------------


def format_attributes(op: LoweredOp) -> list[str]:
    """What differs from the kind's defaults. Raises ExecError where the kind cannot read it."""
    kind = kind_of(op.kind_id)
    attrs = kind.unpack(op.attr_schema, op.attr_blob)
    shown = []
    for name, value in attrs.items():
        if name not in kind.attrs.defaults or kind.attrs.defaults[name] != value:
            text = f"{name}={value if isinstance(value, str) else repr(value)}"
            shown.append(text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}...")
    return shown


def format_constraints(op: LoweredOp, name: Callable[[int], str]) -> list[str]:
    """What the call asks of the planner; ``name`` gives a value's."""
    words = {
        "constraints": op.constraints,
        "hints": op.hints,
        "saved": [f"%{name(vid)}" for vid in op.saved],
    }
    return [f"{key}={', '.join(given)}" for key, given in words.items() if given]


def _format_call(op: LoweredOp, name: Callable[[int], str]) -> str:
    def listed(vids: Sequence[int]) -> str:
        return ", ".join("-" if vid < 0 else f"%{name(vid)}" for vid in vids)

    try:
        kind, attrs = kind_of(op.kind_id).name, format_attributes(op)
    except ExecError:
        kind, attrs = f"kind {op.kind_id}", [f"schema={op.attr_schema} blob={op.attr_blob.hex()}"]
    text = "".join(f"  {item}" for item in (*attrs, *format_constraints(op, name)))
    return f"{kind}({listed(op.in_vids)}) -> {listed(op.out_vids)}{text}"


# --- alias bases ---------------------------------------------------------------------------------


class BaseView(NamedTuple):
    """A value in the memory of its alias base; offset and strides in elements.

    Bases are inputs, stored values and outputs of calls that are no views; a base's own view begins
    at 0.
    """

    base: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def extent(self) -> int:
        """How many elements it is from its first to its last, both included."""
        return extent(self.shape, self.strides)

    def is_whole(self, base: ValueSpec) -> bool:
        """Whether it is all of its base, each element once."""
        count = math.prod(self.shape)
        return (
            self.offset == 0
            and count == math.prod(base.shape) == extent(base.shape, base.steps)
            and count == self.extent
        )

    def is_inside(self, base: ValueSpec) -> bool:
        """Whether it reaches over no end of its base's memory."""
        end = self.offset + self.extent
        forward = min((self.offset, *self.strides), default=0) >= 0
        empty = math.prod(self.shape) == 0
        return empty or (forward and end <= extent(base.shape, base.steps))

    def is_alike(self, other: BaseView) -> bool:
        """Whether both order as many elements alike, whatever their bases."""
        return self.shape == other.shape and same_order(self.shape, self.strides, other.strides)


def find_bases(values: Mapping[int, ValueSpec], ops: Iterable[LoweredOp]) -> dict[int, BaseView]:
    """Every value in its base. Raises ExecError where a call reads what nothing made before."""
    made = {vid for op in ops for vid in op.out_vids}
    views = {vid: _own(spec) for vid, spec in values.items() if vid not in made}
    for op in ops:
        for vid in op.reads:
            if vid not in views:
                raise ExecError(f"{op.where or kind_of(op.kind_id).name} reads value {vid} early")
        if op.kind_id == VIEW.id:
            views[op.out_vids[0]] = _viewed(op, views[op.in_vids[0]])
        else:
            views.update((vid, _own(values[vid])) for vid in op.makes)
    return views


def _own(spec: ValueSpec) -> BaseView:
    return BaseView(spec.vid, 0, spec.shape, spec.steps)


def _viewed(op: LoweredOp, source: BaseView) -> BaseView:
    """A view's offset counts from the first element of what it views. Raises ExecError."""
    attrs = VIEW.unpack(op.attr_schema, op.attr_blob)
    shape, strides = tuple(attrs["shape"]), tuple(attrs["strides"])
    if len(shape) != len(strides):
        raise ExecError(
            f"{op.where or VIEW.name}: a view has as many strides as sizes, found the sizes "
            f"{list(shape)} and the strides {list(strides)}; write one stride a dimension"
        )
    return BaseView(source.base, source.offset + attrs["offset"], shape, strides)
