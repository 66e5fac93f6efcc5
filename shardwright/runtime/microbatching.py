"""A call's tensors in microbatches, and the results of microbatches as one.

In come tensors by name; out come those of each microbatch, and later the joined outputs. What
always holds: both ways are ordinary operators, so that gradients find their way through them; one
microbatch is the call itself, uncut.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from shardwright.errors import InputError

Reduction = Literal["mean", "sum", "first"]
"""How outputs without a batch dimension become one: weighed by rows, added, or all the same."""


@dataclass(frozen=True, slots=True)
class Cutting:
    """How batches are cut.

    count, dim
        Microbatches, and the dimension whose rows they share as evenly as can be.
    batched
        The inputs that are cut. Where None, those that along ``dim`` are as long as the first
        input that has such a dimension.
    reduce
        For outputs without a batch dimension, how those of the microbatches become one.
    """

    count: int
    dim: int = 0
    batched: Collection[str] | None = None
    reduce: Mapping[str, Reduction] | None = None

    def check(self, inputs: Collection[str], outputs: Collection[str]) -> None:
        """Raise InputError where this does not fit a model with such inputs and outputs."""
        if self.count < 1 or self.dim < 0:
            raise InputError(
                f"{self.count} microbatches along dimension {self.dim}; expected at least 1, and "
                "a dimension counted from the first, which is 0"
            )
        if unknown := sorted(set(self.batched or ()) - set(inputs)):
            raise InputError(
                f"batched= names {', '.join(map(repr, unknown))}; the model's inputs are: "
                f"{', '.join(inputs)}"
            )
        if unknown := sorted(set(self.reduce or ()) - set(outputs)):
            raise InputError(
                f"reduce= names {', '.join(map(repr, unknown))}; the model's outputs are: "
                f"{', '.join(outputs)}"
            )
        for name, word in (self.reduce or {}).items():
            if word not in get_args(Reduction):
                raise InputError(
                    f"reduce= says {word!r} for {name!r}; it is one of {', '.join(REDUCTIONS)}"
                )

    def cut(self, inputs: Mapping[str, Tensor]) -> Microbatches:
        """The tensors of each microbatch. Raises InputError where there are too few rows."""
        if self.count == 1:
            return Microbatches([dict(inputs)], [1])
        batched = self._batched(inputs)
        rows = inputs[next(iter(batched))].shape[self.dim]
        if rows < self.count:
            raise InputError(
                f"a batch of {rows} rows cannot be cut in {self.count} microbatches; give at "
                f"least {self.count} rows along dimension {self.dim}, or make a pipeline of fewer"
            )
        quotient, longer = divmod(rows, self.count)
        sizes = [quotient + (number < longer) for number in range(self.count)]
        pieces = {
            name: tensor.split(sizes, self.dim) if name in batched else [tensor] * self.count
            for name, tensor in inputs.items()
        }
        parts = [{name: pieces[name][number] for name in inputs} for number in range(self.count)]
        return Microbatches(parts, sizes)

    def _batched(self, inputs: Mapping[str, Tensor]) -> list[str]:
        """The inputs to cut, which are equally long. Raises InputError where there is none."""
        lengths = {
            name: tensor.shape[self.dim]
            for name, tensor in inputs.items()
            if tensor.dim() > self.dim
        }
        if self.batched is None:
            if not lengths:
                raise InputError(
                    f"no input has a dimension {self.dim}, along which a batch could be cut: "
                    f"{_listed(inputs)}"
                )
            length = next(iter(lengths.values()))
            return [name for name in inputs if lengths.get(name) == length]
        found = {lengths.get(name) for name in self.batched}
        if not self.batched or len(found) != 1 or None in found:
            raise InputError(
                f"the inputs that batched= names must be equally long along dimension {self.dim}: "
                f"{_listed({name: inputs[name] for name in self.batched})}"
            )
        return list(self.batched)

    def join(self, name: str, parts: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
        """An output of the whole call. Raises InputError where nothing says how."""
        if len(parts) == 1:
            return parts[0]
        if name in (self.reduce or {}):
            assert self.reduce is not None
            return REDUCTIONS[self.reduce[name]](parts, sizes)
        lengths = [part.shape[self.dim] if part.dim() > self.dim else None for part in parts]
        if lengths != list(sizes):
            raise InputError(
                f"the output {name!r} of the first microbatch is {_shape(parts[0])}, which has no "
                f"{sizes[0]} rows along dimension {self.dim}; say how those of the microbatches "
                f"become one: reduce={{{name!r}: 'mean'}}, or 'sum', or 'first' where all are equal"
            )
        return torch.cat(list(parts), self.dim)


@dataclass(frozen=True, slots=True)
class Microbatches:
    """The tensors of each microbatch by name, and how many rows each has."""

    parts: list[dict[str, Tensor]]
    sizes: list[int]


def _mean(parts: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    weighed = [part * (size / sum(sizes)) for part, size in zip(parts, sizes, strict=True)]
    return torch.stack(weighed).sum(0)


def _sum(parts: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    return torch.stack(list(parts)).sum(0)


def _first(parts: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    return parts[0]


REDUCTIONS = {"mean": _mean, "sum": _sum, "first": _first}


def _shape(tensor: Tensor) -> str:
    return f"{tensor.dtype}{list(tensor.shape)}"


def _listed(tensors: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name} {_shape(tensor)}" for name, tensor in tensors.items()) or "none"
