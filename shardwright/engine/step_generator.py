"""The Generator of a training pipeline: it cuts a step's batch in microbatches, and joins them.

In comes a call with the whole batch; each slot gets its slices, those that there are once a
microbatch with the microbatch for a leading dimension. Outputs come back the same way.

A rank that drives one slot may read its own rows of the batch alone: `own_rows` says which those
are, and `cut` takes inputs of just these rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.comm.transport import TensorSpec
from shardwright.comm.wire import conform
from shardwright.engine.generator import Generator, Slices, part_of
from shardwright.engine.replacement import Microbatching
from shardwright.errors import InputError
from shardwright.ir.tensor_meta import torch_dtype
from shardwright.pipeline.schema import Document, MetadataTensor


@dataclass(frozen=True, slots=True)
class InputRows:
    """The rows of an input that a slot reads: half-open ranges of ``dim``, in order."""

    dim: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def count(self) -> int:
        """How many rows."""
        return sum(end - start for start, end in self.ranges)


class StepGenerator(Generator):
    """Cuts a step's inputs and joins its outputs as a training pipeline's metadata says.

    ``slot`` is the one that this process drives, None where it drives all.
    """

    def __init__(self, pipeline: Document, slot: str | None = None) -> None:
        super().__init__(pipeline)
        assert pipeline.training is not None
        assert pipeline.training.microbatches is not None
        self._cut = Microbatching.of(pipeline)
        self._dims = pipeline.training.microbatches.dim
        self._own = self.own_rows(slot) if slot is not None else {}

    def own_rows(self, slot: str) -> dict[str, InputRows]:
        """Which rows of each batch input a slot reads; none of those that it does not need."""
        found: dict[str, list[tuple[int, int]]] = {
            name: [] for name in self._originals.inputs if name in self._dims
        }
        for name, piece in self._slices.inputs.items():
            if piece.device == slot and piece.origin in found:
                start, end = piece.placements[self._dims[piece.origin]]
                steps = range(self._cut.n) if name in self._cut.inputs else range(1)
                size = self._microbatch_size(piece.origin)
                found[piece.origin] += [(start + i * size, end + i * size) for i in steps]
        return {
            name: InputRows(self._dims[name], _merged(ranges)) for name, ranges in found.items()
        }

    def cut(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Slices:
        """What each device slot takes; every slot is a key. Raises InputError.

        Numbers may stand for inputs without dimensions, such as the learning rate.
        """
        whole = self.name(args, {name: self._tensor(name, item) for name, item in kwargs.items()})
        whole = {name: self._filled(name, tensor.detach()) for name, tensor in whole.items()}
        for name, tensor in whole.items():
            self._check(name, tensor, self._originals.inputs[name])
        cut: Slices = {slot: {} for slot in self._slots}
        for name, piece in self._slices.inputs.items():
            tensor = whole[piece.origin].to(torch_dtype(piece.dtype))
            if name in self._cut.inputs:
                batches = self._microbatches(tensor, piece.origin)
                cut[piece.device][name] = part_of(
                    batches, ((0, self._cut.n), *piece.placements)
                ).contiguous()
            else:
                part = part_of(tensor, piece.placements)
                cut[piece.device][name] = conform(part, TensorSpec.of(self._tensors[name]))
        return cut

    def join(self, outputs: Mapping[str, Tensor]) -> Any:
        """The step's result, from all of the pipeline's outputs by name."""
        wholes: dict[str, Tensor] = {}
        for name, piece in self._slices.outputs.items():
            original, tensor = self._originals.outputs[piece.origin], outputs[name]
            if name in self._cut.outputs and self._cut.outputs[name] is None:
                tensor = tensor[0]
            whole = wholes.setdefault(piece.origin, _empty(original))
            if name in self._cut.outputs and self._cut.outputs[name] is not None:
                batches = self._microbatches(whole, piece.origin)
                part_of(batches, ((0, self._cut.n), *piece.placements)).copy_(tensor)
            else:
                part_of(whole, piece.placements).copy_(tensor)
        return self.fold(wholes)

    def _microbatches(self, whole: Tensor, origin: str) -> Tensor:
        """A view with the microbatch for a leading dimension."""
        dim, n = self._dims[origin], self._cut.n
        sizes = whole.shape
        cut = whole.view(*sizes[:dim], n, sizes[dim] // n, *sizes[dim + 1 :])
        return cut.movedim(dim, 0)

    def _microbatch_size(self, origin: str) -> int:
        return self._originals.inputs[origin].shape[self._dims[origin]] // self._cut.n

    def _tensor(self, name: str, item: Any) -> Any:
        """A tensor for a number, where the input has no dimensions."""
        expected = self._originals.inputs.get(name)
        if expected is None or expected.shape or type(item) not in (int, float):
            return item
        return torch.tensor(item, dtype=torch_dtype(expected.dtype))

    def _filled(self, name: str, tensor: Tensor) -> Tensor:
        """The whole input of a slot's own rows; the rows that it does not read are zeros."""
        rows, expected = self._own.get(name), self._originals.inputs[name]
        if rows is None or not _is_own(tensor, rows, expected):
            return tensor
        whole = tensor.new_zeros(expected.shape)
        taken = 0
        for start, end in rows.ranges:
            part = tensor.narrow(rows.dim, taken, end - start)
            whole.narrow(rows.dim, start, end - start).copy_(part)
            taken += end - start
        return whole

    def _check(self, name: str, tensor: Tensor, expected: MetadataTensor) -> None:
        """Raise InputError where a tensor is not the batch that the pipeline was made for."""
        dtype = torch_dtype(expected.dtype)
        if tuple(tensor.shape) == expected.shape and tensor.dtype == dtype:
            return
        taken = f"a step takes {dtype}{list(expected.shape)}"
        if (dim := self._dims.get(name)) is not None:
            size = self._microbatch_size(name)
            taken += f", {self._cut.n} microbatches of {size} along dimension {dim}"
        if (rows := self._own.get(name)) is not None:
            taken += f", or the {rows.count} rows of it that this rank reads"
        raise InputError(
            f"input {name!r} is {tensor.dtype}{list(tensor.shape)}, but {taken}; shapes are "
            "static: train makes a program for each shape that it meets, a Session takes one"
        )


def _is_own(tensor: Tensor, rows: InputRows, expected: MetadataTensor) -> bool:
    shape = list(expected.shape)
    shape[rows.dim] = rows.count
    return list(tensor.shape) == shape and rows.count < expected.shape[rows.dim]


def _merged(ranges: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Ranges in order, those that touch or overlap as one."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return tuple(found)


def _empty(original: MetadataTensor) -> Tensor:
    return torch.empty(original.shape, dtype=torch_dtype(original.dtype))
