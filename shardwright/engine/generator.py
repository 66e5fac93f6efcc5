"""The Generator: from a user's call to the tensors that each device slot takes, and back.

Input: a call, or a training step's batch, with whole tensors; `Generator.cut` compares it with
the pipeline's metadata and gives each slot its slices, those that there are once a microbatch with
the microbatch for a leading dimension. `Generator.join` puts slices of outputs together and folds
them into the object that the original returns.

Slices have the dtype, shape and strides that the pipeline declares; they may share memory with the
user's tensors. Without ``Metadata.structure`` tensors are given by position or name, and the result
is a dict by name, or the one tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.comm.transport import TensorSpec
from shardwright.comm.wire import conform
from shardwright.engine.program import Microbatching, is_training
from shardwright.errors import InputError
from shardwright.ir.structure import flatten_call, leaves, rebuild
from shardwright.ir.tensor_meta import torch_dtype
from shardwright.pipeline.schema import Document, MetadataTensor, Placements

Slices = dict[str, dict[str, Tensor]]
"""Tensors by device slot and name."""


@dataclass(frozen=True, slots=True)
class InputRows:
    """The rows of an input that a slot reads: half-open ranges of ``dim``, in order."""

    dim: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def count(self) -> int:
        """How many rows."""
        return sum(end - start for start, end in self.ranges)


class Generator:
    """Cuts inputs and joins outputs as a pipeline's metadata says.

    ``slot`` is the one that this process drives, None where it drives all. A rank that drives one
    may give its own rows of a step's batch alone.
    """

    def __init__(self, pipeline: Document, slot: str | None = None) -> None:
        microbatches = pipeline.training.microbatches if pipeline.training is not None else None
        self._tensors = pipeline.tensors
        self._originals = pipeline.metadata.tensors
        self._slices = pipeline.metadata.tensor_slices
        self._structure = pipeline.metadata.structure
        self._slots = list(pipeline.devices)
        self._is_step = is_training(pipeline)
        self._cut = Microbatching.of(pipeline)
        self._dims = microbatches.dim if microbatches is not None else {}
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

    # --- inputs -----------------------------------------------------------------------------

    def cut(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Slices:
        """What each device slot takes; every slot is a key. Raises InputError.

        In a step numbers may stand for inputs without dimensions, such as the learning rate.
        """
        if self._is_step:
            kwargs = {name: self._tensor(name, item) for name, item in kwargs.items()}
        return self.cut_named(self.name(args, kwargs))

    def cut_named(self, whole: Mapping[str, Tensor]) -> Slices:
        """As `cut`, of tensors by their names in the original."""
        whole = {name: self._filled(name, tensor.detach()) for name, tensor in whole.items()}
        for name, tensor in whole.items():
            self._check(name, tensor, self._originals.inputs[name])
        cut: Slices = {slot: {} for slot in self._slots}
        for name, piece in self._slices.inputs.items():
            tensor, dtype = whole[piece.origin], torch_dtype(piece.dtype)
            if name in self._cut.inputs:
                batches = self._microbatches(tensor.to(dtype), piece.origin)
                part = part_of(batches, ((0, self._cut.n), *piece.placements)).contiguous()
            else:
                part = part_of(tensor, piece.placements).to(dtype)
                part = conform(part, TensorSpec.of(self._tensors[name]))
            cut[piece.device][name] = part
        return cut

    def has_shapes(self, whole: Mapping[str, Tensor]) -> bool:
        """Whether a call's tensors have the shapes that the pipeline takes."""
        inputs = self._originals.inputs
        return all(tuple(tensor.shape) == inputs[name].shape for name, tensor in whole.items())

    def name(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        """The call's tensors by their names in the original. Raises InputError."""
        if self._structure is None:
            named = self._name_flat(args, kwargs)
        else:
            arguments = self._structure.inputs
            names = [leaf.name for leaf in leaves(arguments)]
            named = dict(zip(names, flatten_call(arguments, args, kwargs), strict=True))
        for name, tensor in named.items():
            if tensor.layout is not torch.strided or tensor.is_meta:
                found = "on the meta device" if tensor.is_meta else f"of layout {tensor.layout}"
                raise InputError(f"input {name!r} is {found}; give a dense tensor with contents")
        return named

    def _name_flat(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        names = _by_place(self._originals.inputs)
        given = dict(zip(names, args, strict=False)) | dict(kwargs)
        if (
            len(args) > len(names)
            or set(kwargs) & set(names[: len(args)])
            or set(given) - set(names)
        ):
            raise InputError(
                f"{len(args)} positional arguments and the names {sorted(kwargs)} were given; "
                f"the inputs are: {', '.join(names)}"
            )
        for name in names:
            if not isinstance(given.get(name), Tensor):
                raise InputError(f"input {name!r} must be given, as a tensor")
        return given

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
        """Raise InputError where a tensor is not what the pipeline was made for."""
        dtype = torch_dtype(expected.dtype)
        if tuple(tensor.shape) == expected.shape and tensor.dtype == dtype:
            return
        found = f"input {name!r} is {tensor.dtype}{list(tensor.shape)}, but"
        taken = f"{dtype}{list(expected.shape)}"
        if not self._is_step:
            raise InputError(
                f"{found} the pipeline takes {taken}; shapes are static, so pad or cut the input, "
                "or build a pipeline for this shape"
            )
        if (dim := self._dims.get(name)) is not None:
            size = self._microbatch_size(name)
            taken += f", {self._cut.n} microbatches of {size} along dimension {dim}"
        if (rows := self._own.get(name)) is not None:
            taken += f", or the {rows.count} rows of it that this rank reads"
        raise InputError(
            f"{found} a step takes {taken}; shapes are static: train makes a program for each "
            "shape that it meets, a TrainingRunner takes one"
        )

    # --- outputs ----------------------------------------------------------------------------

    def join(self, outputs: Mapping[str, Tensor]) -> Any:
        """The original's result, from all of the pipeline's outputs by name."""
        return self.fold(self.join_named(outputs))

    def join_named(self, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The original's outputs by name; a slice that is all of one is that output itself."""
        wholes: dict[str, Tensor] = {}
        parts = {name: self._part(name, outputs[name]) for name in self._slices.outputs}
        for name, piece in self._slices.outputs.items():
            original = self._originals.outputs[piece.origin]
            if tuple(parts[name].shape) == original.shape:
                wholes.setdefault(piece.origin, parts[name].to(torch_dtype(original.dtype)))
        complete = set(wholes)
        for name, piece in self._slices.outputs.items():
            if piece.origin in complete:
                continue
            original, placements = self._originals.outputs[piece.origin], piece.placements
            if piece.origin not in wholes:
                dtype = torch_dtype(original.dtype)
                wholes[piece.origin] = torch.empty(original.shape, dtype=dtype)
            whole = wholes[piece.origin]
            if self._cut.outputs.get(name) is not None:
                whole = self._microbatches(whole, piece.origin)
                placements = ((0, self._cut.n), *placements)
            part_of(whole, placements).copy_(parts[name])
        return wholes

    def _part(self, name: str, tensor: Tensor) -> Tensor:
        """A slice as it was given, of a single microbatch without its leading dimension."""
        alone = name in self._cut.outputs and self._cut.outputs[name] is None
        return tensor[0] if alone else tensor

    def fold(self, wholes: Mapping[str, Tensor]) -> Any:
        """The object that the original returns, of its outputs by name."""
        whole = {name: wholes[name] for name in _by_place(self._originals.outputs)}
        if self._structure is not None:
            return rebuild(self._structure.outputs, list(whole.values()))
        return next(iter(whole.values())) if len(whole) == 1 else whole

    # --- microbatches -----------------------------------------------------------------------

    def _microbatches(self, whole: Tensor, origin: str) -> Tensor:
        """A view with the microbatch for a leading dimension."""
        dim, n = self._dims[origin], self._cut.n
        sizes = whole.shape
        cut = whole.view(*sizes[:dim], n, sizes[dim] // n, *sizes[dim + 1 :])
        return cut.movedim(dim, 0)

    def _microbatch_size(self, origin: str) -> int:
        return self._originals.inputs[origin].shape[self._dims[origin]] // self._cut.n


def part_of(tensor: Tensor, placements: Placements) -> Tensor:
    """The view of a tensor that placements take."""
    return tensor[tuple(slice(start, end) for start, end in placements)]


def _by_place(originals: Mapping[str, MetadataTensor]) -> list[str]:
    return sorted(originals, key=lambda name: originals[name].idx)


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
