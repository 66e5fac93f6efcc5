"""Rows of the table of kernel kinds, and the calls that a row's functions are shown.

A `KernelRow` says all there is to a kind: its id, operands and packed attributes, what a call of it
makes, which memory its outputs may share, which operators of torch become it (`from_aten`), and
torch's kernel for it; a native kernel of the same id may stand beside that.

An id never changes its meaning, a schema never its layout; a new need is a new schema. Schema 0 is
the call with default attributes and an empty blob. Schemas of another number have a blob,
little-endian and without padding, that is read whole or refused:

    code    field                               bytes
    B       whole number below 256, or a flag   1
    i, q    whole number                        4, 8
    d       float                               8
    q*, d*  tuple of numbers                    u32 count, then 8 each
    s       text, UTF-8                         u32 length, then so many
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from shardwright.errors import ExecError
from shardwright.ir.tensor_meta import TensorMeta, dtype_name, torch_dtype

if TYPE_CHECKING:
    from shardwright.kernels.node_call import Emitter

ABSENT = -1
"""Stands for an optional operand that is not there."""
FLOATS = ("f64", "f32", "f16", "bf16")
"""The dtypes that kernels compute floating-point numbers in."""
COUNTED = 2**63
"""Below this, 64 bits with a sign count what there is."""
ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu", "tanh", "sigmoid")
"""What a call's ``activation`` number means; ``gelu`` is by the error function."""
CONSTRAINTS: Mapping[str, str] = {
    "contiguous": "every operand is contiguous: others are copied before and after",
    "alike": "the operands of one row, a parameter and what belongs to it, are dense and ordered "
    "alike in memory; a kind without lists has one row, of all operands that are of one shape",
    "no_alias": "no result lies in an operand's memory, even if its kind lets it",
    "ordered": "calls that are ordered keep their order among one another",
}
"""What holds of a call in every plan: its own words, and those of its kind."""
HINTS: Mapping[str, str] = {
    "early": "the call stays where the graph has it",
    "late": "the call is made just before the first one that reads what it makes",
}
"""What a plan follows where nothing speaks against it."""

# --- packed attributes ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AttrSchema:
    """The fields of a blob in order, and their codes. No fields: an empty blob."""

    fields: Mapping[str, str]

    def pack(self, values: Mapping[str, Any]) -> bytes:
        """The values as bytes. Raises ExecError where one is missing, unknown or does not fit."""
        if set(values) != set(self.fields):
            raise ExecError(f"attributes {sorted(values)}; the schema has {sorted(self.fields)}")
        parts = []
        for name, code in self.fields.items():
            try:
                parts.append(_pack(code, values[name]))
            except (struct.error, TypeError, AttributeError) as error:
                raise ExecError(f"attribute {name}={values[name]!r}: {error}") from None
        return b"".join(parts)

    def unpack(self, blob: bytes) -> dict[str, Any]:
        """The values by name. Raises ExecError where the blob is shorter or longer."""
        values, at = {}, 0
        for name, code in self.fields.items():
            try:
                values[name], at = _unpack(code, blob, at)
            except (struct.error, UnicodeDecodeError) as error:
                raise ExecError(
                    f"a blob of {len(blob)} bytes ends in attribute {name!r}: {error}"
                ) from None
        if at != len(blob):
            raise ExecError(f"a blob of {len(blob)} bytes; the schema's fields take {at}")
        return values


def _pack(code: str, value: Any) -> bytes:
    if code == "s":
        data: bytes = value.encode()
        return struct.pack("<I", len(data)) + data
    if code.endswith("*"):
        return struct.pack(f"<I{len(value)}{code[0]}", len(value), *value)
    return struct.pack(f"<{code}", value)


def _unpack(code: str, blob: bytes, at: int) -> tuple[Any, int]:
    """A field's value, and where the next begins."""
    if code == "s" or code.endswith("*"):
        (count,) = struct.unpack_from("<I", blob, at)
        form = f"<{count}s" if code == "s" else f"<{count}{code[0]}"
        found = struct.unpack_from(form, blob, at + 4)
        end = at + 4 + struct.calcsize(form)
        return (found[0].decode() if code == "s" else found), end
    (value,) = struct.unpack_from(f"<{code}", blob, at)
    return value, at + struct.calcsize(f"<{code}")


def attributes(**fields: str) -> dict[int, AttrSchema]:
    """Schema 1 with these fields, by their codes."""
    return {1: AttrSchema(fields)}


# --- rows ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One kind.

    operands
        Inputs and outputs in order, with their shapes for people; ``?`` marks optional ones, ``…``
        lists.
    torch
        Torch's kernel: attributes and tensors in, a call without arguments out.
    makes
        For each output of a call what it may be. Raises ExecError for a call that is not legal.
        None for a view: where it lies is all that can be wrong with it.
    from_aten
        Emitters of operators, by full name.
    schemas, defaults
        Fields of the blob by schema number, 1 and up; what schema 0 means.
    elementwise, pairs
        What an output may share with an input that nobody reads afterwards: any with any of its
        shape, dtype and strides, since an element is read before it is written and no other is
        read; else these pairs of an output and an input, or the ``written`` lists.
    lists, written
        For multi-tensor kinds, how many lists of equal length the inputs begin with, and which of
        them the outputs renew, in the outputs' order.
    free
        Whether it costs nothing at run time (a view).
    constrains
        What holds of every call of it (`CONSTRAINTS`).
    """

    id: int
    name: str
    operands: str
    torch: TorchKernel
    makes: Callable[[KernelCall], Sequence[Sequence[TensorMeta]]] | None
    from_aten: Mapping[str, Emitter] = field(default_factory=dict)
    schemas: Mapping[int, AttrSchema] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    elementwise: bool = False
    pairs: tuple[tuple[int, int], ...] = ()
    lists: int = 0
    written: tuple[int, ...] = ()
    free: bool = False
    constrains: tuple[str, ...] = ()

    def takes(self, n_in: int, n_out: int) -> bool:
        """Whether a call may have so many operands, absent ones counted."""
        if self.lists:
            single = 1 if len(self.names(0)) > self.lists else 0
            count, left = divmod(n_in - single, self.lists)
            return count > 0 and left == 0 and n_out == count * len(self.written)
        counts = zip((n_in, n_out), map(self.names, (0, 1)), strict=True)
        return all(len(names) == n or names[:1] in (["x…"], ["y…"]) for n, names in counts)

    def missing(self, inputs: Sequence[int], outputs: Sequence[int]) -> str:
        """The name of an operand that is absent (-1) and not optional; empty where there is none.

        Operands of multi-tensor kinds may be absent by lists.
        """
        if self.lists:
            return ""
        for names, vids in zip(map(self.names, (0, 1)), (inputs, outputs), strict=True):
            for k, vid in enumerate(vids):
                name = names[min(k, len(names) - 1)]
                if vid < 0 and name[-1] not in "?…":
                    return name
        return ""

    def names(self, side: int) -> list[str]:
        """The inputs (0) or outputs (1) by their names in `operands`."""
        return _operand_names(self.operands)[side]

    def aliases(self, n_in: int, n_out: int) -> list[tuple[int, int]]:
        """Which outputs may lie in which inputs, by place."""
        if self.elementwise:
            return [(o, k) for o in range(n_out) for k in range(n_in)]
        if not self.lists:
            return [(o, k) for o, k in self.pairs if k < n_in]
        count = n_in // self.lists
        return [
            (position * count + k, listed * count + k)
            for position, listed in enumerate(self.written)
            for k in range(min(count, n_out - position * count))
        ]

    @property
    def has_defaults(self) -> bool:
        """Whether every attribute has a default, so that schema 0 says what the call is."""
        return all(schema.fields.keys() == self.defaults.keys() for schema in self.schemas.values())

    def pack(self, attrs: Mapping[str, Any]) -> tuple[int, bytes]:
        """The schema and the blob of these attributes: schema 0 where all are the defaults."""
        if self.has_defaults and dict(attrs) == dict(self.defaults):
            return 0, b""
        return 1, self.schema(1).pack(attrs)

    def unpack(self, schema: int, blob: bytes) -> dict[str, Any]:
        """The attributes. Raises ExecError for an unknown schema or a blob of another length."""
        if schema == 0 and self.has_defaults:
            if blob:
                raise ExecError(f"{self.name}: schema 0 has no blob, found {len(blob)} bytes")
            return dict(self.defaults)
        try:
            return self.schema(schema).unpack(blob)
        except ExecError as error:
            raise ExecError(f"{self.name}, schema {schema}: {error}") from None

    def schema(self, number: int) -> AttrSchema:
        """The schema of a number. Raises ExecError where the kind has none."""
        if number not in self.schemas:
            known = ", ".join(map(str, [0] * self.has_defaults + sorted(self.schemas)))
            raise ExecError(f"{self.name} has no attribute schema {number}; known are {known}")
        return self.schemas[number]

    def check_constraints(
        self, constraints: Collection[str], hints: Collection[str], where: str
    ) -> None:
        """Raise ExecError for a word that is not known, or that cannot be followed."""
        given = ("constraint", constraints, CONSTRAINTS), ("hint", hints, HINTS)
        for name, words, known in given:
            for word in words:
                if word not in known:
                    raise ExecError(
                        f"{where}: the {name} {word!r} is unknown; this version has "
                        f"{', '.join(known)}"
                    )
        if {"early", "late"} <= set(hints):
            raise ExecError(f"{where}: a call is hinted to be early or late, not both")
        if self.free and not set(constraints) <= {"ordered"}:
            raise ExecError(
                f"{where}: a {self.name} lies in what it is of, so it cannot be constrained to "
                f"{', '.join(constraints)}; constrain the call that reads it"
            )


@cache
def _operand_names(operands: str) -> tuple[list[str], list[str]]:
    """The names of inputs and outputs, without their shapes."""
    inputs, outputs = (
        [name.strip() for name in side.split(",") if name.strip()]
        for side in re.sub(r"\[[^]]*\]", "", operands).split("→")
    )
    return inputs, outputs


# --- calls, as rules see them --------------------------------------------------------------------


Makes = Sequence[Sequence[TensorMeta]]
"""For each output what it may be; nothing where the call makes none."""


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One call; None stands for an operand that is absent.

    Methods that look at an operand or attribute raise ExecError where it is not as they say.
    """

    kind: KernelRow
    attrs: Mapping[str, Any]
    inputs: tuple[TensorMeta | None, ...]
    outputs: tuple[TensorMeta | None, ...]

    def get(self, name: str) -> TensorMeta | None:
        """An input by its name in the row; None too where the kind has no such input."""
        names = [given.rstrip("?") for given in self.kind.names(0)]
        return self.inputs[names.index(name)] if name in names else None

    def __getitem__(self, name: str) -> TensorMeta:
        """An input that the kind needs."""
        found = self.get(name)
        assert found is not None, "a call has the operands that its kind needs"
        return found

    @property
    def present(self) -> list[TensorMeta]:
        """The inputs that are there."""
        return [operand for operand in self.inputs if operand is not None]

    @property
    def said(self) -> TensorMeta:
        """The first output as the graph has it, of a kind that makes what it is told to."""
        found = self.outputs[0]
        assert found is not None, "a call has the operands that its kind needs"
        return like(found)

    def float_dtype(self, *names: str) -> str:
        """The one dtype, of floats, of these inputs, of all that are there by default."""
        operands = [found for name in names if (found := self.get(name))] or self.present
        dtypes = {operand.dtype for operand in operands}
        need(
            len(dtypes) == 1 and dtypes <= set(FLOATS),
            f"it reads {', '.join(map(str, operands))}",
            f"one dtype of {', '.join(FLOATS)}",
        )
        return operands[0].dtype

    def need_shape(self, shape: Sequence[int], *names: str) -> None:
        """These inputs, where they are there, have this shape."""
        for name in names:
            operand = self.get(name)
            if operand is not None and operand.shape != tuple(shape):
                raise ExecError(f"{name} is {operand}; expected the shape {list(shape)}")

    def shape_of(self, name: str, rank: int) -> tuple[int, ...]:
        """The shape of an input, which has so many dimensions."""
        operand = self[name]
        need(len(operand.shape) == rank, f"{name} is {operand}", f"{rank} dimensions")
        return operand.shape

    def number(self, name: str, low: int, end: int) -> int:
        """A whole attribute from ``low`` up, below ``end``."""
        value: int = self.attrs[name]
        need(low <= value < end, f"{name}={value}", f"a number from {low} to {end - 1}")
        return value

    def flags(self, *names: str) -> list[bool]:
        """Attributes that are 0 or 1."""
        return [bool(self.number(name, 0, 2)) for name in names]

    def need_activation(self) -> None:
        """The attribute is the number of an activation."""
        known = ", ".join(f"{i} {name}" for i, name in enumerate(ACTIVATIONS))
        value = self.attrs["activation"]
        need(value < len(ACTIVATIONS), f"activation={value}", f"one of {known}")

    def need_fits(self, name: str, dtype: str) -> None:
        """The attribute is a number that tensors of this dtype can be filled with."""
        value, wanted = self.attrs[name], torch_dtype(dtype)
        fits = math.isfinite(value) or wanted.is_floating_point or wanted.is_complex
        try:
            torch.empty((), dtype=wanted).fill_(value)
        except RuntimeError:
            fits = False
        need(fits, f"{name}={value}", f"a number that {dtype} holds")


def need(holds: bool, found: str, expected: str) -> None:
    """Raise ExecError where it does not hold."""
    if not holds:
        raise ExecError(f"{found}; expected {expected}")


def like(operand: TensorMeta) -> TensorMeta:
    """An output of an operand's shape and dtype."""
    return TensorMeta(operand.shape, operand.dtype)


def broadcast(*operands: TensorMeta) -> tuple[int, ...]:
    """The shape that operands have together. Raises ExecError."""
    try:
        return tuple(torch.broadcast_shapes(*(operand.shape for operand in operands)))
    except RuntimeError:
        found = ", ".join(map(str, operands))
        raise ExecError(f"it reads {found}; expected shapes that broadcast together") from None


def promoted(*operands: TensorMeta) -> str:
    """The dtype that torch computes two operands in. Raises ExecError."""
    need(
        not any(operand.dtype == "f8" for operand in operands),
        f"it reads {', '.join(map(str, operands))}",
        "a dtype that is computed with; f8 is only stored",
    )
    a, b = (
        torch.empty((1,) * len(operand.shape), dtype=torch_dtype(operand.dtype), device="meta")
        for operand in operands
    )
    return dtype_name(torch.result_type(a, b))


# --- torch's kernels -----------------------------------------------------------------------------

Attrs = Mapping[str, Any]
Tensors = Sequence[torch.Tensor | None]
Closure = Callable[[], object]
TorchKernel = Callable[[Attrs, Tensors, Tensors], Closure]
"""Attributes, inputs and outputs to a call that writes the outputs in place and looks nothing up.

Operands that are not there are None; tensors need no gradient; an output may lie where the kind
lets it lie in an input.
"""


def present(tensors: Tensors) -> list[torch.Tensor]:
    """The operands that are there."""
    return [tensor for tensor in tensors if tensor is not None]


def needed(*tensors: torch.Tensor | None) -> list[torch.Tensor]:
    """Operands that the kind does not let be absent."""
    found = present(tensors)
    assert len(found) == len(tensors), "lowering gives every operand that a kind needs"
    return found


def store(made: Sequence[torch.Tensor | None], outs: Tensors) -> None:
    """Copies what a functional call made to where it belongs."""
    for tensor, out in zip(made, outs, strict=False):
        if out is not None and tensor is not None:
            out.copy_(tensor.reshape(out.shape))


def rows_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """A matrix view with all but the last dimension as rows; None where it would be a copy."""
    try:
        return tensor.view(-1, tensor.shape[-1]) if tensor.numel() else None
    except RuntimeError:
        return None
