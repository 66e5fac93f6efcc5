"""Rows of the table of kernel kinds, and the calls that a row's functions are shown.

A `KernelRow` says all there is to a kind: its id, operands and packed attributes, what a call of it
makes, which memory its outputs may share, which operators of torch become it (`from_aten`), and
torch's kernel for it; a native kernel of the same id may stand beside that.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from shardwright.errors import ExecError
from shardwright.ir import IRGraph, IRNode, resolve
from shardwright.ir.operators import join_call, signature
from shardwright.ir.tensor_meta import TensorMeta, dtype_name, torch_dtype
from shardwright.ir.values import SLOT, Emitted
from shardwright.kernels.attributes import AttrSchema
from shardwright.kernels.torch_kernels import TorchKernel
from shardwright.torch_internals import OpOverload

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
    attrs
        Fields of the blob in schema 1; schema 0 means the defaults.
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
    attrs: AttrSchema = field(default_factory=AttrSchema)
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
        return self.attrs.codes.keys() == self.attrs.defaults.keys()

    def pack(self, attrs: Mapping[str, Any]) -> tuple[int, bytes]:
        """The schema and the blob of attributes, others by default: schema 0 for defaults alone."""
        given = {**self.attrs.defaults, **attrs}
        if self.has_defaults and given == self.attrs.defaults:
            return 0, b""
        return 1, self.attrs.pack(given)

    def unpack(self, schema: int, blob: bytes) -> dict[str, Any]:
        """The attributes. Raises ExecError for an unknown schema or a blob of another length."""
        if schema == 0 and self.has_defaults:
            if blob:
                raise ExecError(f"{self.name}: schema 0 has no blob, found {len(blob)} bytes")
            return dict(self.attrs.defaults)
        if schema != 1 or not self.attrs.codes:
            known = ", ".join(["0"] * self.has_defaults + ["1"] * bool(self.attrs.codes))
            raise ExecError(f"{self.name} has no attribute schema {schema}; known are {known}")
        try:
            return self.attrs.unpack(blob)
        except ExecError as error:
            raise ExecError(f"{self.name}, schema {schema}: {error}") from None

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


# --- nodes, as emitters see them -----------------------------------------------------------------
#
# An emitter sees shapes, dtypes, strides, attributes and which results anyone reads, never ids; so
# nodes that are alike in these share what was emitted.


class OperandPlace(int):
    """A tensor among a call's arguments: an operand by place."""


class NodeCall:
    """One node; ``arguments`` are its operator's by name, with `OperandPlace` for tensors."""

    def __init__(
        self,
        kinds: Mapping[str, KernelRow],
        graph: IRGraph,
        node: IRNode,
        live: Collection[int] | None = None,
    ) -> None:
        self.op = node.op
        self.overload: OpOverload = resolve(node.op)
        self.attrs = node.attrs
        self.absent = node.absent
        self.operands = [graph.values[k].meta for k in (*node.inputs, *node.outputs)]
        self.n_inputs = len(node.inputs)
        self._kinds = kinds
        self._live = [live is None or value_id in live for value_id in node.outputs]
        self._temps: list[TensorMeta] = []
        places = [OperandPlace(k) for k in range(self.n_inputs)]
        self.args, self.kwargs = join_call(self.overload, places, node.attrs, SLOT)
        names = [p.name for p in signature(self.overload).parameters if not p.keyword_only]
        self.arguments: dict[str, Any] = dict(zip(names, self.args, strict=True)) | self.kwargs

    def given(self, names: str) -> list[Any]:
        """The arguments of these names, which spaces divide."""
        return [self.arguments[name] for name in names.split()]

    @property
    def made(self) -> tuple[OperandPlace, ...]:
        """The places of the node's outputs."""
        end = len(self.operands) - len(self._temps)
        return tuple(OperandPlace(k) for k in range(self.n_inputs, end))

    @property
    def results(self) -> list[int]:
        """The outputs as the operator returns them, `ABSENT` where it returns no tensor."""
        left = iter(self.made)
        count = len(self.made) + len(self.absent)
        return [ABSENT if k in self.absent else next(left) for k in range(count)]

    @property
    def wanted(self) -> list[int]:
        """As `results`, `ABSENT` also where nobody reads the output."""
        return [
            place if place != ABSENT and self._live[place - self.n_inputs] else ABSENT
            for place in self.results
        ]

    def of(self, place: int) -> TensorMeta:
        """What is known of an operand."""
        return self.operands[place]

    def temp(self, shape: Sequence[int], dtype: str) -> OperandPlace:
        """A contiguous tensor between this node's calls; the next `emit` is to make it."""
        self._temps.append(TensorMeta(tuple(shape), dtype))
        self.operands.append(self._temps[-1])
        return OperandPlace(len(self.operands) - 1)

    def emit(
        self,
        kind: str,
        inputs: Sequence[int | None],
        outputs: Sequence[int] | None = None,
        **attrs: Any,
    ) -> Emitted:
        """A call of a kind; attributes that are left out have their defaults.

        ``outputs`` are the node's results by default; None among the inputs is absent.
        """
        row = self._kinds[kind]
        schema, blob = row.pack(attrs)
        made = tuple(self.results if outputs is None else outputs)
        first = len(self.operands) - len(self._temps)
        temps = tuple(self._temps[place - first] for place in made if place >= first)
        places = tuple(ABSENT if place is None else int(place) for place in inputs)
        return Emitted(row.id, schema, blob, places, tuple(map(int, made)), temps)


Emission = Sequence[Emitted] | Emitted | None
"""What an emitter gives: calls, or None where it leaves the node to others.

An emitter need not look at what its kind's own rule does (`KernelRow.makes`): calls that are not
legal are taken for None.
"""

Emitter = Callable[[NodeCall], Emission]


def emits(kind: str, inputs: str, attrs: str = "", **fixed: Any) -> Emitter:
    """An emitter of one call, on arguments by name; ``-`` is an operand that is absent."""

    def emit(call: NodeCall) -> Emission:
        places = [None if name == "-" else call.arguments[name] for name in inputs.split()]
        given = {name: call.arguments[name] for name in attrs.split()}
        return call.emit(kind, places, None, **given, **fixed)

    return emit


def is_tensor(*arguments: Any) -> bool:
    """Whether all of these arguments are tensors."""
    return all(isinstance(argument, OperandPlace) for argument in arguments)


def is_number(argument: Any) -> bool:
    """Whether an argument is a real number."""
    return isinstance(argument, (bool, int, float))
