"""A call's tensors in microbatches, and the results of microbatches as one.

Both ways are ordinary operators, so that gradients find their way through them; one microbatch is
the call itself, uncut.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from shardwright.codegenerate.gpipe import PipelineStage, Shape
from shardwright.errors import InputError

Reduction = Literal["mean", "sum", "first"]
"""How outputs without a batch dimension become one: weighed by rows, added, or all the same."""


class MicrobatchTensors(NamedTuple):
    """The tensors of each microbatch by name, and how many rows each has.

    ``sizes`` are those of the first input that is cut, then those of inputs that are cut in others.
    """

    parts: list[dict[str, Tensor]]
    sizes: list[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Batching:
    """How batches are cut along a dimension, as evenly as can be.

    batched
        The inputs that are cut. Where None, each whose shape in a microbatch is known if it is
        ``count`` times as long as that; of others those as long as the first that is cut, or else
        the first that has such a dimension.
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
        for option, given, known, kind in (
            ("batched", self.batched, inputs, "inputs"),
            ("reduce", self.reduce, outputs, "outputs"),
        ):
            if unknown := sorted(set(given or ()) - set(known)):
                raise InputError(
                    f"{option}= names {', '.join(map(repr, unknown))}; the model's {kind} are: "
                    f"{', '.join(known)}"
                )
        for name, word in (self.reduce or {}).items():
            if word not in get_args(Reduction):
                raise InputError(
                    f"reduce= says {word!r} for {name!r}; it is one of "
                    f"{', '.join(get_args(Reduction))}"
                )

    def whole(self, shape: Shape) -> Shape:
        """The shape of a tensor whose pieces have this one; a tensor of fewer dimensions is one."""
        if len(shape) <= self.dim:
            return shape
        return *shape[: self.dim], self.count * shape[self.dim], *shape[self.dim + 1 :]

    # --- into microbatches ------------------------------------------------------------------

    def cut(
        self, inputs: Mapping[str, Tensor], captured: Mapping[str, Shape] | None = None
    ) -> MicrobatchTensors:
        """The tensors of each microbatch. Raises InputError where there are too few rows.

        ``captured`` are the shapes that inputs must have in a microbatch, where that is known;
        `check_shapes` has passed.
        """
        if self.count == 1:
            return MicrobatchTensors([dict(inputs)], [(1,)])
        batched = self._batched(inputs, captured or {})
        sizes = {name: self._sizes(inputs[name].shape[self.dim]) for name in batched}
        pieces = {
            name: tensor.split(list(sizes[name]), self.dim)
            if name in sizes
            else [tensor] * self.count
            for name, tensor in inputs.items()
        }
        parts = [{name: pieces[name][number] for name in inputs} for number in range(self.count)]
        return MicrobatchTensors(parts, list(dict.fromkeys(sizes.values())))

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
        self, inputs: Mapping[str, Tensor], captured: Mapping[str, Shape]
    ) -> Collection[str]:
        """The inputs to cut. Raises InputError where there is none, or lengths differ."""
        rows = {name: t.shape[self.dim] for name, t in inputs.items() if t.dim() > self.dim}
        if self.batched is None:
            return self._batched_by_length(inputs, rows, captured)
        missing = not self.batched or any(name not in rows for name in self.batched)
        if missing or len({rows[name] for name in self.batched if name not in captured}) > 1:
            raise InputError(
                f"the inputs that batched= names must be equally long along dimension {self.dim}: "
                f"{_listed({name: inputs[name] for name in self.batched})}"
            )
        return self.batched

    def _batched_by_length(
        self,
        inputs: Mapping[str, Tensor],
        rows: Mapping[str, int],
        captured: Mapping[str, Shape],
    ) -> list[str]:
        """Inputs that are ``count`` times as long as captured; of unknown ones, equally long."""
        known = {
            name
            for name, shape in captured.items()
            if name in rows and rows[name] == self.whole(shape)[self.dim] != shape[self.dim]
        }
        first = [rows[name] for name in rows if name in known]
        first += [rows[name] for name in rows if name not in captured]
        if not first:
            missing = (
                f"is {self.count} times as long along dimension {self.dim} as in a microbatch"
                if rows
                else f"has a dimension {self.dim}"
            )
            raise InputError(
                f"no input {missing}, so there is no batch to cut: {_listed(inputs)}; give the "
                "rows of all microbatches, or make a pipeline of one microbatch"
            )
        alike = {name for name in rows if name not in captured and rows[name] == first[0]}
        return [name for name in inputs if name in known or name in alike]

    # --- and back ---------------------------------------------------------------------------

    def join(self, name: str, parts: Sequence[Tensor], batch: MicrobatchTensors) -> Tensor:
        """An output of the whole call. Raises InputError where nothing says how.

        One that ``reduce`` does not name is taken to have a row for each of the microbatch's where
        it is as long as an input's piece: its shape is all that is known of it.
        """
        if len(parts) == 1:
            return parts[0]
        word = (self.reduce or {}).get(name)
        if word is not None:
            return _reduced(word, parts, batch.sizes[0])
        lengths = tuple(part.shape[self.dim] if part.dim() > self.dim else -1 for part in parts)
        if lengths not in batch.sizes:
            raise InputError(
                f"the output {name!r} of the first microbatch is {_shape(parts[0])}, which has no "
                f"{batch.sizes[0][0]} rows along dimension {self.dim}; say how those of the "
                f"microbatches become one: reduce={{{name!r}: 'mean'}}, or 'sum', or 'first' where "
                "all are equal"
            )
        return torch.cat(list(parts), self.dim)


def _reduced(word: Reduction, parts: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    if word == "first":
        return parts[0]
    if word == "mean":
        parts = [part * (size / sum(sizes)) for part, size in zip(parts, sizes, strict=True)]
    return torch.stack(list(parts)).sum(0)


def _shape(tensor: Tensor) -> str:
    return f"{tensor.dtype}{list(tensor.shape)}"


def _listed(tensors: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name} {_shape(tensor)}" for name, tensor in tensors.items()) or "none"


# --- the shapes that stages were captured with ----------------------------------------------------


def captured_shapes(stages: Iterable[PipelineStage]) -> dict[str, Shape]:
    """The shape of each of the model's inputs in a microbatch, of which a stage says it."""
    return {
        name: shape
        for stage in stages
        for name, source, shape in zip(stage.inputs, stage.sources, stage.shapes, strict=True)
        if source is None and shape is not None
    }


def check_shapes(
    stages: Iterable[PipelineStage], batching: Batching, given: Mapping[str, Tensor]
) -> None:
    """Raise InputError where microbatches would not have the shapes that stages compute with."""
    for stage in stages:
        for name, shape in captured_shapes([stage]).items():
            found, batched = tuple(given[name].shape), batching.batched
            fitting = {shape, batching.whole(shape)}
            if batched is not None:
                fitting = {batching.whole(shape) if name in batched else shape}
            if found not in fitting:
                raise InputError(
                    f"the input {name!r} is {list(found)}, but stage {stage.index} was captured "
                    f"with {list(shape)}, and computes with that alone; "
                    f"{_remedy(name, shape, found, batching)}"
                )


def _remedy(name: str, shape: Shape, found: Shape, batching: Batching) -> str:
    """What to do where an input has another shape: which sizes divide, if that is all."""
    dim, count, batched = batching.dim, batching.count, batching.batched
    if batched is not None and found in (shape, batching.whole(shape)):
        return f"leave {name!r} out of batched=" if name in batched else "name it in batched="
    given_whole = batched is not None and name not in batched
    others = (found[:dim], found[dim + 1 :])
    if given_whole or len(shape) <= dim or others != (shape[:dim], shape[dim + 1 :]):
        return "pad or cut it, or capture the model with this shape"
    rows, size = found[dim], shape[dim]
    divides = size > 0 and rows > 0 and rows % size == 0
    fitting = f", or {_counted(rows // size)}" if divides else ""
    return (
        f"give {count * size} rows in {_counted(count)}{fitting}, or capture the model with the "
        "shapes of a microbatch"
    )


def _counted(microbatches: int) -> str:
    return f"{microbatches} microbatch{'' if microbatches == 1 else 'es'}"
