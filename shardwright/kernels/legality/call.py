"""A call as its kind's rule sees it: attributes, what it reads, and what it is said to make.

Comes in: shapes, dtypes and strides as a graph has them. Goes out, by a `Rule`: what the call makes
of its operands, or an ExecError that says which operand or attribute is wrong. What always holds:
a rule is shown operands that are as many as its kind has, with those that it needs; it looks at
nothing but the call, so that what holds of a call holds of every one that is equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from shardwright.errors import ExecError
from shardwright.ir.tensor_meta import dtype_name, torch_dtype
from shardwright.kernels.kinds import ACTIVATIONS, Kind

FLOATS = ("f64", "f32", "f16", "bf16")
"""The dtypes that kernels compute floating-point numbers in."""


class Operand(NamedTuple):
    """A tensor as it lies; strides in elements."""

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class Made(NamedTuple):
    """A tensor that a call makes."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


Makes = Sequence[Sequence[Made]]
"""For each output what it may be; nothing where the call makes none."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call; None stands for an operand that is absent."""

    kind: Kind
    attrs: Mapping[str, Any]
    inputs: tuple[Operand | None, ...]
    outputs: tuple[Operand | None, ...]

    def get(self, name: str) -> Operand | None:
        """An input by its name in the table of kinds."""
        names = [given.rstrip("?") for given in self.kind.names(0)]
        return self.inputs[names.index(name)]

    def __getitem__(self, name: str) -> Operand:
        """An input that the kind needs."""
        found = self.get(name)
        assert found is not None, "a call has the operands that its kind needs"
        return found

    @property
    def present(self) -> list[Operand]:
        """The inputs that are there."""
        return [operand for operand in self.inputs if operand is not None]


Rule = Callable[[Call], Makes]
Table = Mapping[str, Rule]
"""Rules by the kind's name."""


# --- what rules ask for ----------------------------------------------------------------------


def need(holds: bool, found: str, expected: str) -> None:
    """Raise ExecError where it does not hold."""
    if not holds:
        raise ExecError(f"{found}; expected {expected}")


def like(operand: Operand) -> Made:
    """An output of an operand's shape and dtype."""
    return Made(operand.shape, operand.dtype)


def one_float(call: Call, *names: str) -> str:
    """The one dtype, of floats, of these inputs, of all that are there by default."""
    operands = [found for name in names if (found := call.get(name))] or call.present
    dtypes = {operand.dtype for operand in operands}
    need(
        len(dtypes) == 1 and dtypes <= set(FLOATS),
        f"it reads {', '.join(map(str, operands))}",
        f"one dtype of {', '.join(FLOATS)}",
    )
    return operands[0].dtype


def shaped(call: Call, name: str, *shapes: Sequence[int]) -> None:
    """An input, where it is there, has one of these shapes."""
    operand = call.get(name)
    if operand is not None and operand.shape not in map(tuple, shapes):
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise ExecError(f"{name} is {operand}; expected the shape {wanted}")


def of_rank(call: Call, name: str, *ranks: int) -> tuple[int, ...]:
    """The shape of an input, which has so many dimensions."""
    operand = call[name]
    wanted = " or ".join(map(str, ranks))
    need(len(operand.shape) in ranks, f"{name} is {operand}", f"{wanted} dimensions")
    return operand.shape


def ranged(call: Call, name: str, low: int, end: int) -> int:
    """A whole attribute from ``low`` up, below ``end``."""
    value: int = call.attrs[name]
    need(low <= value < end, f"{name}={value}", f"a number from {low} to {end - 1}")
    return value


def flag(call: Call, *names: str) -> list[bool]:
    """Attributes that are 0 or 1."""
    return [bool(ranged(call, name, 0, 2)) for name in names]


def activation(call: Call) -> None:
    """The attribute is the number of an activation."""
    known = ", ".join(f"{i} {name}" for i, name in enumerate(ACTIVATIONS))
    value = call.attrs["activation"]
    need(value < len(ACTIVATIONS), f"activation={value}", f"one of {known}")


def holds(call: Call, name: str, dtype: str) -> None:
    """A number that tensors of this dtype can be filled with."""
    value, wanted = call.attrs[name], torch_dtype(dtype)
    fits = math.isfinite(value) or wanted.is_floating_point or wanted.is_complex
    try:
        torch.empty((), dtype=wanted).fill_(value)
    except RuntimeError:
        fits = False
    need(fits, f"{name}={value}", f"a number that {dtype} holds")


def broadcast(*operands: Operand) -> tuple[int, ...]:
    """The shape that operands have together."""
    try:
        return tuple(torch.broadcast_shapes(*(operand.shape for operand in operands)))
    except RuntimeError:
        found = ", ".join(map(str, operands))
        raise ExecError(f"it reads {found}; expected shapes that broadcast together") from None


def promoted(*operands: Operand) -> str:
    """The dtype that torch computes two operands in."""
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
