"""The Generator: from a user's call to the tensors that each device slot takes, and back.

In comes a call with whole tensors; `cut` holds it against the pipeline's metadata and gives each
slot its slices. `join` puts the slices of outputs together and folds them into the object that the
original model returns.

What always holds: slices have the dtype, shape and strides that the pipeline declares; they may
share memory with the user's tensors. Without ``Metadata.structure`` tensors are given by position
or name, and the result is a dict by name, or the one tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.comm.transport import TensorSpec
from shardwright.comm.wire import conform
from shardwright.errors import InputError
from shardwright.ir.structure import flatten_call, leaves, rebuild
from shardwright.ir.tensor_meta import torch_dtype
from shardwright.pipeline.schema import Document, MetadataTensor, Placements

Slices = dict[str, dict[str, Tensor]]
"""Tensors by device slot and name."""


class Generator:
    """Cuts inputs and joins outputs as a pipeline's metadata says."""

    def __init__(self, pipeline: Document) -> None:
        self._tensors = pipeline.tensors
        self._originals = pipeline.metadata.tensors
        self._slices = pipeline.metadata.tensor_slices
        self._structure = pipeline.metadata.structure
        self._slots = list(pipeline.devices)

    def cut(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Slices:
        """What each device slot takes; every slot is a key. Raises InputError."""
        return self.cut_named(self.name(args, kwargs))

    def cut_named(self, whole: Mapping[str, Tensor]) -> Slices:
        """As `cut`, of a call's tensors by their names in the original."""
        for name, tensor in whole.items():
            _check(name, tensor, self._originals.inputs[name])
        cut: Slices = {slot: {} for slot in self._slots}
        for name, piece in self._slices.inputs.items():
            part = part_of(whole[piece.origin].detach(), piece.placements)
            part = part.to(torch_dtype(piece.dtype))
            cut[piece.device][name] = conform(part, TensorSpec.of(self._tensors[name]))
        return cut

    def join(self, outputs: Mapping[str, Tensor]) -> Any:
        """The original model's result, from all of the pipeline's outputs by name."""
        return self.fold(self.join_named(outputs))

    def join_named(self, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The original model's outputs by name."""
        parts: dict[str, list[tuple[Placements, Tensor]]] = {}
        for name, piece in self._slices.outputs.items():
            parts.setdefault(piece.origin, []).append((piece.placements, outputs[name]))
        originals = self._originals.outputs
        return {name: _whole(originals[name], parts[name]) for name in originals}

    def has_shapes(self, whole: Mapping[str, Tensor]) -> bool:
        """Whether a call's tensors have the shapes that the pipeline takes."""
        inputs = self._originals.inputs
        return all(tuple(tensor.shape) == inputs[name].shape for name, tensor in whole.items())

    def fold(self, wholes: Mapping[str, Tensor]) -> Any:
        """The object that the original model returns, of its outputs by name."""
        whole = {name: wholes[name] for name in _by_place(self._originals.outputs)}
        if self._structure is not None:
            return rebuild(self._structure.outputs, list(whole.values()))
        return next(iter(whole.values())) if len(whole) == 1 else whole

    def name(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        """The call's tensors by their names in the original."""
        if self._structure is None:
            return self._name_flat(args, kwargs)
        arguments = self._structure.inputs
        names = [leaf.name for leaf in leaves(arguments)]
        return dict(zip(names, flatten_call(arguments, args, kwargs), strict=True))

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


def _by_place(originals: Mapping[str, MetadataTensor]) -> list[str]:
    return sorted(originals, key=lambda name: originals[name].idx)


def _check(name: str, tensor: Tensor, expected: MetadataTensor) -> None:
    """Raise InputError where a tensor is not what the pipeline was made for."""
    dtype = torch_dtype(expected.dtype)
    if tuple(tensor.shape) != expected.shape or tensor.dtype != dtype:
        raise InputError(
            f"input {name!r} is {tensor.dtype}{list(tensor.shape)}, but the pipeline takes "
            f"{dtype}{list(expected.shape)}; shapes are static, so pad or cut the input, or build "
            "a pipeline for this shape"
        )


def part_of(tensor: Tensor, placements: Placements) -> Tensor:
    """The view of a tensor that placements take."""
    return tensor[tuple(slice(start, end) for start, end in placements)]


def _whole(original: MetadataTensor, parts: Sequence[tuple[Placements, Tensor]]) -> Tensor:
    """An output of the original; itself where one slice is all of it."""
    for _, tensor in parts:
        if tuple(tensor.shape) == original.shape:
            return tensor.to(torch_dtype(original.dtype))
    whole = torch.empty(original.shape, dtype=torch_dtype(original.dtype))
    for placements, tensor in parts:
        part_of(whole, placements).copy_(tensor)
    return whole
