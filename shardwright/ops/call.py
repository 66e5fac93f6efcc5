"""What a row of the catalog is made of: a call, the rule of its splits, what a part sees.

A rule's annotation is written for one call: it depends on shapes and attributes (softmax gives its
dimension ``^``, a view has brackets, a dimension that is broadcast is ``1``). Where the operator
itself on slices is not the part's program, the rule says what is: `Rule.attrs` changes attributes,
`Rule.emit` writes nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal, Protocol

import torch

from shardwright.ir import Builder, IRValue, Scope, Source, resolve
from shardwright.ir.operators import join_call, split_call
from shardwright.ops.dimop import Cut

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CatalogCall:
    """One call of an operator, as `IRNode` stores it: shapes, dtypes and attributes."""

    op: str
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    attrs: Mapping[str, Any]
    dtypes: tuple[str, ...]
    """Of the inputs, by short name."""

    def tensors(self) -> tuple[Shape, ...]:
        """The shapes of inputs, then outputs."""
        return (*self.inputs, *self.outputs)

    def dim(self, name: str = "dim", *, of: int = 0) -> int:
        """The attribute ``name`` as a dimension of input ``of``, counted from the front."""
        return int(self.attrs[name]) % max(len(self.inputs[of]), 1)

    def dims(self, name: str = "dim", *, of: int = 0) -> set[int]:
        """The attribute ``name`` as dimensions of input ``of``; all where it is None or empty."""
        rank, value = len(self.inputs[of]), self.attrs.get(name)
        if value is None or value == []:
            return set(range(rank))
        return {dim % max(rank, 1) for dim in (value if isinstance(value, list) else [value])}

    def has(self, name: str) -> bool:
        """Whether the argument ``name`` is a tensor in this call."""
        return name not in self.attrs


@dataclass(frozen=True, slots=True)
class Local:
    """What one part of a split call sees."""

    call: CatalogCall
    lengths: Mapping[str, int]
    """Of identifiers, those that are cut at their length here."""
    whole_lengths: Mapping[str, int]
    cuts: Mapping[str, Cut]
    inputs: tuple[Shape | None, ...]
    outputs: tuple[Shape | None, ...]
    summed: frozenset[str] = frozenset()
    """Identifiers that are cut and summed over."""

    @property
    def share(self) -> float:
        """The part's share of the elements that are summed over."""
        here = math.prod(self.lengths[name] for name in self.summed)
        return here / math.prod(self.whole_lengths[name] for name in self.summed)

    def start(self, name: str) -> int:
        """Where this part's range of an identifier starts."""
        return self.cuts[name].start if name in self.cuts else 0

    def size(self, index: int = 0) -> list[int]:
        """The sizes of output ``index`` here."""
        shape = self.outputs[index]
        assert shape is not None
        return list(shape)


class Emitter(Protocol):
    """Takes a part's program: writes it into a graph (`Writer`), or runs it (`Direct`)."""

    def emit(self, op: str, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
        """A call in the form of `IRNode`; gives what it makes, a list where that is several."""
        ...

    def call(self, op: str, /, *args: Any, **kwargs: Any) -> Any:
        """A call written as in Python."""
        inputs, attrs = split_call(resolve(op), args, kwargs, is_tensor=_is_value)
        return self.emit(op, inputs, attrs)


def _is_value(item: Any) -> bool:
    return isinstance(item, (IRValue, torch.Tensor))


@dataclass(frozen=True, slots=True)
class Writer(Emitter):
    """Writes nodes into a builder, all under the modules and line of one node."""

    builder: Builder
    scopes: tuple[Scope, ...] = ()
    source: Source | None = None

    def emit(self, op: str, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
        """As `Builder.emit`."""
        return self.builder.emit(op, inputs, attrs, scopes=self.scopes, source=self.source)


@dataclass(frozen=True, slots=True)
class Direct(Emitter):
    """Computes at once, on tensors."""

    device: str | torch.device = "cpu"

    def emit(self, op: str, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
        """The operator's result."""
        overload = resolve(op)
        args, kwargs = join_call(overload, inputs, dict(attrs), torch.device(self.device))
        made = overload(*args, **kwargs)
        return list(made) if isinstance(made, (list, tuple)) else made


Inputs = Sequence[Any]
Emit = Callable[[Emitter, Local, Inputs], Any]


@dataclass(frozen=True, slots=True)
class Rule:
    """What a row says of one call.

    annotation
        One input and one output each for the call's, written for its shapes.
    lengths
        Of identifiers that no input gives.
    terms
        As in `Dimop`; every other input that lacks a ``+`` identifier is shared.
    optional
        Term inputs that the operator can do without: their attribute's name.
    attrs
        The attributes that a part changes.
    emit
        Writes the nodes of a part and returns its outputs, one value or a list; None where the
        operator itself is the part's program.
    reduction
        How partial outputs are put together: ``sum``, ``max`` or ``min``.
    linear
        Sets of inputs in which the operator is linear: where all of a set are partial sums and
        the other inputs are whole, the outputs are partial sums.
    """

    annotation: str
    lengths: Mapping[str, int] = field(default_factory=dict)
    terms: frozenset[int] = frozenset()
    optional: Mapping[int, str] = field(default_factory=dict)
    attrs: Callable[[Local], Mapping[str, Any]] | None = None
    emit: Emit | None = None
    reduction: str = "sum"
    linear: tuple[tuple[int, ...], ...] = ()


SplitRule = Callable[[CatalogCall], Rule | None]
"""Gives the rule of a call; None where no split is right, as for random numbers."""


@dataclass(frozen=True, slots=True)
class OperatorRow:
    """What is known of an operator; what a row leaves out is as of any that moves its bytes.

    rule
        How its calls split; None for operators of backwards.
    flops
        The multiplications and additions of a call.
    efficiency
        What share of the rate of large products it reaches.
    elements, backward_elements
        Operations for each element of the first input, where a CPU takes longer for them than for
        its bytes: of a call, and of its backward.
    free
        Whether it gives what it is given, seen otherwise.
    reads
        What it reads of its first input: all, no more than it makes (``rows``), or the ``shape``.
    """

    rule: SplitRule | None
    flops: Callable[[CatalogCall], int] | None = None
    efficiency: float = 1.0
    elements: int = 0
    backward_elements: int = 0
    free: bool = False
    reads: Literal["all", "rows", "shape"] = "all"


def table(rule: SplitRule | None, names: str, **columns: Any) -> dict[str, OperatorRow]:
    """A row each for operators of ``aten``; an overload that is not named is the default one."""
    row = OperatorRow(rule, **columns)
    return {
        f"aten.{name}" if "." in name else f"aten.{name}.default": row for name in names.split()
    }


Dims = list[str]


def letters(number: int, *, without: str = "") -> Dims:
    """So many identifiers: a, b, c, …"""
    return [name for name, _ in zip(_names(without), range(number), strict=False)]


def _names(without: str) -> Iterator[str]:
    for round_ in count():
        for letter in "abcdefghijklmnopqrstuvwxyz":
            if letter not in without:
                yield f"{letter}{round_ or ''}"


def text(inputs: Sequence[Dims | str], outputs: Sequence[Dims | str]) -> str:
    """An annotation of lists of dimensions; ``"?"`` stands for itself."""
    return f"{_side(inputs)} -> {_side(outputs)}".lstrip()


def _side(tensors: Sequence[Dims | str]) -> str:
    return ", ".join(
        tensor if isinstance(tensor, str) else " ".join(tensor) or "()" for tensor in tensors
    )


def aligned(shape: Shape, names: Dims, full: Sequence[int]) -> Dims:
    """The dimensions of a tensor that is broadcast to ``full``: ``1``, or the name from the right.

    ``names`` are the dimensions of the full shape.
    """
    if not shape:
        return []
    pairs = zip(shape, names[-len(shape) :], full[-len(shape) :], strict=True)
    return ["1" if size == 1 and whole != 1 else name for size, name, whole in pairs]


def named(shape: Shape, reduction: str = "", *, without: str = "") -> Dims:
    """A name for each dimension; a size of 1 is the number 1, as it is never split."""
    names = letters(len(shape), without=without)
    return [
        "1" if size == 1 else f"{name}{reduction}" for name, size in zip(names, shape, strict=True)
    ]


def along(
    call: CatalogCall,
    dims: Collection[int],
    *,
    shape: Shape | None = None,
    indices: Collection[int] = (),
    linear: tuple[tuple[int, ...], ...] = (),
) -> Rule:
    """The rule of an operator that works along ``dims``; all other dimensions split.

    ``shape`` has all dimensions: by default it is the first input's. Each tensor has them all,
    with a size of its own along ``dims``, or those that remain without ``dims``. Inputs among
    ``indices``, and tensors of other dimensions, stay whole.
    """
    full = call.inputs[0] if shape is None else shape
    dims = {dim for dim in dims if dim < len(full)}  # A scalar takes dim=0 and has none.
    ranked = [item for item in call.tensors() if len(item) == len(full)]
    alike = {dim for dim in dims if all(item[dim] == full[dim] for item in ranked)}
    if not any(len(item) == len(full) for item in call.inputs):
        alike = set()
    names = whole(named(full), alike)
    rest = [dim for dim in range(len(full)) if dim not in dims]

    def written(item: Shape) -> Dims:
        if len(item) == len(full):
            return [
                name if size == whole_size and (dim not in dims or dim in alike) else str(size)
                for dim, (name, size, whole_size) in enumerate(zip(names, item, full, strict=True))
            ]
        if list(item) == [full[dim] for dim in rest]:
            return [names[dim] for dim in rest]
        return numbers(item)

    inputs = [
        numbers(item) if number in indices else written(item)
        for number, item in enumerate(call.inputs)
    ]
    return Rule(text(inputs, list(map(written, call.outputs))), linear=linear)


def numbers(shape: Shape) -> Dims:
    """Sizes that are never split."""
    return [str(size) for size in shape]


def fixed(names: Dims, shape: Shape, dims: set[int]) -> Dims:
    """The names, but with the size itself, never split, at ``dims``."""
    return [str(shape[i]) if i in dims else name for i, name in enumerate(names)]


def whole(names: Dims, dims: set[int]) -> Dims:
    """The names, but never split at ``dims``."""
    return [
        f"{name}^" if i in dims and name.isidentifier() else name for i, name in enumerate(names)
    ]
