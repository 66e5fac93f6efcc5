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
        The inputs that are cut. Where None, each whose shape in a microbatch is known if it is
        ``count`` times as long as that along ``dim``; of others those as long as the first that is
        cut, or else the first that has such a dimension.
    reduce
        For outputs without a batch dimension, how those of the microbatches become one. One that by
        chance is as long as a microbatch must be named here: shapes do not tell.
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

    def whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a tensor whose pieces have this one; a tensor of fewer dimensions is one."""
        if len(shape) <= self.dim:
            return shape
        return *shape[: self.dim], self.count * shape[self.dim], *shape[self.dim + 1 :]

    def fitting(self, name: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """The shapes of an input that give each microbatch one of this shape."""
        if self.batched is None:
            return shape, self.whole(shape)
        return (self.whole(shape) if name in self.batched else shape,)

    def cut(
        self, inputs: Mapping[str, Tensor], captured: Mapping[str, tuple[int, ...]] | None = None
    ) -> Microbatches:
        """The tensors of each microbatch. Raises InputError where there are too few rows.

        ``captured`` are the shapes that inputs must have in a microbatch, where that is known;
        each of these inputs has one of the `fitting` shapes.
        """
        if self.count == 1:
            return Microbatches([dict(inputs)], [(1,)])
        batched = self._batched(inputs, captured or {})
        sizes = {name: self._sizes(inputs[name].shape[self.dim]) for name in batched}
        pieces = {
            name: tensor.split(list(sizes[name]), self.dim)
            if name in sizes
            else [tensor] * self.count
            for name, tensor in inputs.items()
        }
        parts = [{name: pieces[name][number] for name in inputs} for number in range(self.count)]
        return Microbatches(parts, list(dict.fromkeys(sizes.values())))

    def _sizes(self, rows: int) -> tuple[int, ...]:
        """How many rows each microbatch has. Raises InputError where there are too few."""
        if rows < self.count:
            raise InputError(
                f"a batch of {rows} rows cannot be cut in {self.count} microbatches; give at "
                f"least {self.count} rows along dimension {self.dim}, or make a pipeline of fewer"
            )
        quotient, longer = divmod(rows, self.count)
        return tuple(quotient + (number < longer) for number in range(self.count))

    def _batched(
        self, inputs: Mapping[str, Tensor], captured: Mapping[str, tuple[int, ...]]
    ) -> list[str]:
        """The inputs to cut. Raises InputError where there is none, or lengths differ."""
        lengths = {
            name: tensor.shape[self.dim]
            for name, tensor in inputs.items()
            if tensor.dim() > self.dim
        }
        if self.batched is None:
            return self._batched_by_length(inputs, lengths, captured)
        lacking = not self.batched or any(name not in lengths for name in self.batched)
        if lacking or len({lengths[name] for name in self.batched if name not in captured}) > 1:
            raise InputError(
                f"the inputs that batched= names must be equally long along dimension {self.dim}: "
                f"{_listed({name: inputs[name] for name in self.batched})}"
            )
        return list(self.batched)

    def _batched_by_length(
        self,
        inputs: Mapping[str, Tensor],
        lengths: Mapping[str, int],
        captured: Mapping[str, tuple[int, ...]],
    ) -> list[str]:
        """Inputs that are ``count`` times as long as captured; of unknown ones, equally long."""
        known = {
            name
            for name, shape in captured.items()
            if name in lengths and lengths[name] == self.whole(shape)[self.dim] != shape[self.dim]
        }
        rows = next(
            (lengths[name] for name in lengths if name in known),
            next((lengths[name] for name in lengths if name not in captured), None),
        )
        if rows is None:
            missing = (
                f"is {self.count} times as long along dimension {self.dim} as in a microbatch"
                if lengths
                else f"has a dimension {self.dim}"
            )
            raise InputError(
                f"no input {missing}, so there is no batch to cut: {_listed(inputs)}; give the "
                "rows of all microbatches, or make a pipeline of one microbatch"
            )
        return [
            name
            for name in inputs
            if name in known or (name not in captured and lengths.get(name) == rows)
        ]

    def join(self, name: str, parts: Sequence[Tensor], batch: Microbatches) -> Tensor:
        """An output of the whole call. Raises InputError where nothing says how.

        One that ``reduce`` does not name is taken to have a row for each of the microbatch's where
        it is as long as an input's piece: its shape is all that is known of it.
        """
        if len(parts) == 1:
            return parts[0]
        if name in (self.reduce or {}):
            assert self.reduce is not None
            return REDUCTIONS[self.reduce[name]](parts, batch.sizes[0])
        lengths = tuple(part.shape[self.dim] if part.dim() > self.dim else -1 for part in parts)
        if lengths not in batch.sizes:
            raise InputError(
                f"the output {name!r} of the first microbatch is {_shape(parts[0])}, which has no "
                f"{batch.sizes[0][0]} rows along dimension {self.dim}; say how those of the "
                f"microbatches become one: reduce={{{name!r}: 'mean'}}, or 'sum', or 'first' where "
                "all are equal"
            )
        return torch.cat(list(parts), self.dim)


@dataclass(frozen=True, slots=True)
class Microbatches:
    """The tensors of each microbatch by name.

    sizes
        How many rows each microbatch has of the first input that is cut; then the same of inputs
        that are cut in others. At least one.
    """

    parts: list[dict[str, Tensor]]
    sizes: list[tuple[int, ...]]


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
