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

What always holds: ``encode(decode(text)) == text``, and ``decode(encode(graph))`` is the graph with
its values so numbered. What is decoded is a valid graph: kinds, schemas and blobs that are known,
operands as many as the kind has and made before they are read, values that are what their calls
make (`legality`), views inside what they view, and operators that write to nothing and open no
file.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Literal

import msgspec
from msgspec import Struct

from shardwright.errors import ExecError
from shardwright.ir.tensor_meta import DTYPES, itemsize
from shardwright.ir.values import Role
from shardwright.kernels.constraints import check_wishes
from shardwright.kernels.kinds import Kind, kind_of
from shardwright.kernels.legality.check import check_calls
from shardwright.kernels.lowered import ABSENT, LoweredGraph, LoweredOp, ValueSpec
from shardwright.kernels.spots import extent

COUNTED = 2**63
"""Below this, 64 bits with a sign count what there is."""


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
    blob: str = ""
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
    text = _Text(
        1,
        len(graph.inputs),
        tuple(_value(graph.values[vid]) for vid in order),
        tuple(_call(op, numbers) for op in graph.ops),
        tuple(numbers[vid] for vid in graph.outputs),
    )
    return msgspec.json.encode(text).decode()


def _value(spec: ValueSpec) -> _Value:
    return _Value(spec.shape, spec.dtype, spec.strides)


def _call(op: LoweredOp, numbers: Mapping[int, int]) -> _Call:
    return _Call(
        op.kind_id,
        op.attr_schema,
        tuple(numbers[vid] for vid in op.in_vids),
        tuple(numbers[vid] for vid in op.out_vids),
        base64.b64encode(op.attr_blob).decode(),
        op.constraints,
        op.hints,
        tuple(numbers[vid] for vid in op.saved),
    )


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
        blob = base64.b64decode(call.blob, validate=True)
        kind = kind_of(call.kind)
        kind.unpack(call.schema, blob)
    except (binascii.Error, ValueError, ExecError) as error:
        raise ExecError(f"{where}: {error}") from None
    _check_counts(kind, call, where)
    check_wishes(kind, call.constraints, call.hints, where)
    return LoweredOp(
        call.kind,
        call.schema,
        blob,
        call.inputs,
        call.outputs,
        where,
        call.constraints,
        call.hints,
        call.saved,
    )


def _check_counts(kind: Kind, call: _Call, where: str) -> None:
    if not kind.takes(len(call.inputs), len(call.outputs)):
        raise ExecError(
            f"{where}: {kind.name} with {len(call.inputs)} inputs and {len(call.outputs)} outputs; "
            f"its operands are {kind.operands}"
        )
    if missing := kind.lacks(call.inputs, call.outputs):
        raise ExecError(f"{where}: {kind.name} needs {missing}, which is not optional")


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
