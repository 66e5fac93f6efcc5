"""The ``data`` of a ``dfg`` supertask: a lowered graph as JSON text, and back.

    {"version": 1, "inputs": 2,
     "values": [{"shape": [4, 8], "dtype": "f32"}, {"shape": [16, 8], "dtype": "f32"},
                {"shape": [4, 16], "dtype": "f32"}],
     "calls": [{"kind": 20, "schema": 1, "blob": "AAEAAAAAAAAA8D8=", "inputs": [0, 1, -1, -1],
                "outputs": [2]}],
     "outputs": [2]}

Values are numbered as they come to be: the inputs, then what each call makes; -1 is an operand that
is not there. A blob is the call's packed attributes in base64, left out where the schema has none.
A text has no names, so that equal layers give equal text; stored values are inputs of a supertask.
What a call asks of the planner stands where there is any: ``constraints``, ``hints``, ``saved``.

``encode(decode(text)) == text``, and ``decode(encode(graph))`` is the graph with its values so
numbered. What is decoded is proved (`check_calls`), so that a kernel neither reads nor writes
outside of its operands' memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import count
from typing import Literal

import msgspec
from msgspec import Struct

from shardwright.errors import ExecError, GraphError
from shardwright.ir.tensor_meta import DTYPES, TensorMeta, itemsize, overlaps
from shardwright.ir.values import Role
from shardwright.kernels.lowered import (
    BY_ID,
    VIEW,
    BaseView,
    LoweredGraph,
    LoweredOp,
    ValueSpec,
    find_bases,
    kind_of,
)
from shardwright.kernels.row import ABSENT, COUNTED, KernelCall, KernelRow, like
from shardwright.kernels.strides import extent

Operands = tuple[TensorMeta | None, ...]


class _Value(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A value; ``strides`` stand where it is not contiguous."""

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] | None = None


class _Call(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One call."""

    kind: int
    schema: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    blob: bytes = b""
    constraints: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    saved: tuple[int, ...] = ()


class _Text(Struct, frozen=True, forbid_unknown_fields=True):
    """A whole graph."""

    version: Literal[1]
    inputs: int
    values: tuple[_Value, ...]
    calls: tuple[_Call, ...]
    outputs: tuple[int, ...]


# --- writing ---------------------------------------------------------------------------------


def encode(graph: LoweredGraph) -> str:
    """The text of a lowered graph whose tensors all come in as inputs. Raises ExecError."""
    made = {vid for op in graph.ops for vid in op.out_vids}
    read = {vid for op in graph.ops for vid in op.in_vids} | set(graph.outputs)
    stored = read - made - set(graph.inputs) - {ABSENT}
    if stored or graph.updates:
        name = graph.values[min(stored or graph.updates)].name
        raise ExecError(f"graph {graph.name!r} stores %{name}; a supertask's constants are inputs")
    numbers: dict[int, int] = {ABSENT: ABSENT}
    order = [*graph.inputs, *(v for op in graph.ops for v in op.out_vids if v != ABSENT)]
    numbers.update((vid, k) for k, vid in enumerate(order))
    values = tuple(
        _Value(spec.shape, spec.dtype, spec.strides)
        for spec in (graph.values[vid] for vid in order)
    )
    calls = tuple(
        _Call(
            op.kind_id,
            op.attr_schema,
            tuple(numbers[vid] for vid in op.in_vids),
            tuple(numbers[vid] for vid in op.out_vids),
            op.attr_blob,
            op.constraints,
            op.hints,
            tuple(numbers[vid] for vid in op.saved),
        )
        for op in graph.ops
    )
    outputs = tuple(numbers[vid] for vid in graph.outputs)
    text = _Text(1, len(graph.inputs), values, calls, outputs)
    return msgspec.json.encode(text).decode()


# --- reading ---------------------------------------------------------------------------------


def decode(text: str, name: str = "graph") -> LoweredGraph:
    """The graph of a text. Raises ExecError where it is none, naming the call."""
    try:
        parsed = msgspec.json.decode(text, type=_Text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        raise ExecError(f"this is not the text of a lowered graph: {error}") from None
    if not 0 <= parsed.inputs <= len(parsed.values):
        raise ExecError(f"{parsed.inputs} inputs of {len(parsed.values)} values")
    returned = set(parsed.outputs)
    values = {
        k: _spec(k, value, k < parsed.inputs, k in returned)
        for k, value in enumerate(parsed.values)
    }
    ops = tuple(_op(k, call) for k, call in enumerate(parsed.calls))
    _check_order(parsed, ops)
    graph = LoweredGraph(name, values, ops, tuple(range(parsed.inputs)), parsed.outputs)
    check_calls(graph)
    return graph


def _spec(number: int, value: _Value, is_input: bool, is_output: bool) -> ValueSpec:
    wrong = (
        value.dtype not in DTYPES
        or any(size < 0 for size in value.shape)
        or (value.strides is not None and len(value.strides) != len(value.shape))
        or any(stride < 0 for stride in value.strides or ())
    )
    if wrong:
        raise ExecError(
            f"value {number} is {value.dtype}{list(value.shape)} with strides {value.strides}; a "
            f"dtype is one of {', '.join(DTYPES)}, sizes and strides are from 0 up and as many"
        )
    if not _is_countable(value):
        raise ExecError(
            f"value {number} is {value.dtype}{list(value.shape)} with strides {value.strides}; "
            f"sizes, strides and bytes are counted below {COUNTED}, which is more than any machine "
            "has: write the sizes that the tensor has"
        )
    role: Role = "input" if is_input else "output" if is_output else "tmp"
    return ValueSpec(number, f"v{number}", value.shape, value.dtype, role, value.strides)


def _is_countable(value: _Value) -> bool:
    """Whether 64 bits hold what kernels and torch count of a value, contiguous or as it lies."""
    strides = value.strides or (0,) * len(value.shape)
    elements = math.prod(max(size, 1) for size in value.shape)
    reached = max(elements, *value.shape, *strides, extent(value.shape, strides))
    return reached * itemsize(value.dtype) < COUNTED


def _op(number: int, call: _Call) -> LoweredOp:
    """A call with attributes and operands that its kind knows."""
    where = f"call {number}"
    try:
        kind = kind_of(call.kind)
        kind.unpack(call.schema, call.blob)
    except ExecError as error:
        raise ExecError(f"{where}: {error}") from None
    if not kind.takes(len(call.inputs), len(call.outputs)):
        raise ExecError(
            f"{where}: {kind.name} with {len(call.inputs)} inputs and {len(call.outputs)} outputs; "
            f"its operands are {kind.operands}"
        )
    if missing := kind.missing(call.inputs, call.outputs):
        raise ExecError(f"{where}: {kind.name} needs {missing}, which is not optional")
    kind.check_constraints(call.constraints, call.hints, where)
    return LoweredOp(
        call.kind,
        call.schema,
        call.blob,
        call.inputs,
        call.outputs,
        where,
        call.constraints,
        call.hints,
        call.saved,
    )


def _check_order(parsed: _Text, ops: Sequence[LoweredOp]) -> None:
    """Values are made in the order of their numbers, and before they are read."""
    fresh = count(parsed.inputs)
    known = parsed.inputs
    for k, op in enumerate(ops):
        if any(not ABSENT <= vid < known for vid in op.in_vids):
            raise ExecError(f"call {k} reads {op.in_vids}; before it there are {known} values")
        made = [vid for vid in op.out_vids if vid != ABSENT]
        if made != [next(fresh) for _ in made]:
            raise ExecError(f"call {k} makes the values {made}; the next number is {known}")
        known += len(made)
        if any(not 0 <= vid < known for vid in op.saved):
            raise ExecError(f"call {k} saves {op.saved}; when it is done there are {known} values")
    if known != len(parsed.values):
        raise ExecError(f"there are {len(parsed.values)} values, but only {known} are made")
    if any(not 0 <= vid < known for vid in parsed.outputs):
        raise ExecError(f"the outputs are {parsed.outputs}; there are {known} values")


# --- proving ----------------------------------------------------------------------------------


def check_calls(graph: LoweredGraph) -> None:
    """Raise ExecError at the first call that is not what it says.

    After it attributes are ones that the kind knows, operands fit one another, each output has the
    shape and dtype that its call makes, its elements lie apart, and views lie inside what they
    view. Equal calls, by kind, attributes and operands, are checked once.
    """
    bases = find_bases(graph.values, graph.ops)
    operands: dict[int, TensorMeta | None] = {
        vid: TensorMeta(view.shape, graph.values[vid].dtype, view.strides)
        for vid, view in bases.items()
    }
    operands[ABSENT] = None
    for op in graph.ops:
        if op.kind_id == VIEW.id:
            _check_view(graph, op, bases)
            continue
        inputs = tuple(operands[vid] for vid in op.in_vids)
        outputs = tuple(operands[vid] for vid in op.out_vids)
        try:
            check_call(op.kind_id, op.attr_schema, op.attr_blob, inputs, outputs)
        except (ExecError, GraphError) as error:
            raise ExecError(f"{op.where}, {BY_ID[op.kind_id].name}: {error}") from None


@lru_cache(maxsize=8192)
def check_call(kind_id: int, schema: int, blob: bytes, inputs: Operands, outputs: Operands) -> None:
    """Raise ExecError where such a call is wrong."""
    kind = BY_ID[kind_id]
    if kind.makes is None:
        return
    call = KernelCall(kind, kind.unpack(schema, blob), inputs, outputs)
    for k, (said, makes) in enumerate(zip(outputs, kind.makes(call), strict=True)):
        if said is None:
            continue
        if like(said) not in makes:
            wanted = " or ".join(map(str, makes)) or "no such output"
            raise ExecError(
                f"{_name(kind, k)} is {said}, but the call makes {wanted}; lower the pipeline "
                "again, or write what the call makes"
            )
        if overlaps(said.shape, said.full_strides):
            raise ExecError(
                f"{_name(kind, k)} is {said} with strides {list(said.full_strides)}, so that "
                "elements lie on one another; expected strides that keep them apart"
            )


def _name(kind: KernelRow, place: int) -> str:
    """An output in a message."""
    names = kind.names(1)
    name = names[place].rstrip("?") if place < len(names) else ""
    return f"output {place}" if kind.lists or not name or name.endswith("…") else name


def _check_view(graph: LoweredGraph, op: LoweredOp, bases: Mapping[int, BaseView]) -> None:
    """A view lies inside what it views, and is the value that it says."""
    source, made = graph.values[op.in_vids[0]], graph.values[op.out_vids[0]]
    view = bases[made.vid]
    base = graph.values[view.base]
    if (view.shape, source.dtype) != (made.shape, made.dtype) or not view.is_inside(base):
        raise ExecError(
            f"{op.where}: a view of shape {list(view.shape)} and strides {list(view.strides)} "
            f"from element {view.offset}, of {source.dtype}, as "
            f"{TensorMeta(made.shape, made.dtype)}, does not lie in value {view.base}, {base.dtype}"
            f"{list(base.shape)}; a view has the shape and dtype that its value says, and lies "
            "inside what it views"
        )
