"""Sizes that vary from call to call, for graphs that each have fixed ones.

`DynamicShapes` says which dimensions of a program's inputs have which size (``batch``,
``length``), and for which sizes there are programs. A call's sizes are rounded up to those of a
program, its inputs are padded to them, and of its outputs what padding has made is cut away.

Invariant: sizes are rounded up only where that changes no result: along rows that nothing mixes, or
where the program's own mask leaves out what it is padded with (`tracing.program_set`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
import torch

from shardwright.errors import InputError

Sizes = dict[str, int]
"""The sizes of one call or one program, by name."""
Padding = Literal["rows", "mask"]
"""With copies of the last row, or so that masks leave out what is added."""


class DynamicSize(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One size that varies.

    inputs, outputs
        The dimensions that have it. One of an output may be several times as long.
    padding
        How inputs are padded up to a bucket; None where a call's own size is needed.
    reason
        Why it is not padded, in words.
    buckets
        The sizes of programs, in ascending order; powers of two if there are none. A size above the
        last is not rounded.
    """

    inputs: dict[str, tuple[int, ...]]
    outputs: dict[str, tuple[int, ...]] = {}
    padding: Padding | None = None
    reason: str = ""
    buckets: tuple[int, ...] = ()

    def rounded(self, size: int) -> int:
        """The size of the program that a call of ``size`` runs on."""
        if self.padding is None:
            return size
        if not self.buckets:
            return 1 << (size - 1).bit_length()
        return next((bucket for bucket in self.buckets if bucket >= size), size)


class DynamicShapes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sizes of a program that vary, by name; ``masks`` are the inputs padded with zeros."""

    sizes: dict[str, DynamicSize]
    masks: tuple[str, ...] = ()

    def of(self, shapes: Mapping[str, Sequence[int]]) -> Sizes:
        """The sizes of a call, from the shapes of its tensors by name. Raises InputError."""
        found: Sizes = {}
        for name, size in self.sizes.items():
            for tensor, dims in size.inputs.items():
                for dim in dims:
                    self._note(found, name, tensor, dim, shapes[tensor])
        return found

    def _note(self, found: Sizes, name: str, tensor: str, dim: int, shape: Sequence[int]) -> None:
        if dim >= len(shape) or not shape[dim]:
            raise InputError(
                f"input {tensor!r} has the shape {list(shape)}; its dimension {dim} is the size "
                f"{name!r}, from 1 up"
            )
        if found.setdefault(name, shape[dim]) != shape[dim]:
            raise InputError(
                f"the size {name!r} is {found[name]} in one input and {shape[dim]} in dimension "
                f"{dim} of {tensor!r}, which is {list(shape)}; give inputs of one {name}"
            )

    def rounded(self, sizes: Sizes) -> Sizes:
        """The sizes of the program that a call runs on. Raises InputError where one is missing."""
        if sizes.keys() != self.sizes.keys():
            raise InputError(
                f"the sizes {', '.join(sizes) or 'none'} were given; the program has "
                f"{', '.join(self.sizes)}"
            )
        return {name: size.rounded(sizes[name]) for name, size in self.sizes.items()}

    def pad(self, tensors: Mapping[str, torch.Tensor], sizes: Sizes) -> dict[str, torch.Tensor]:
        """A call's tensors with these sizes, which are none below its own."""
        found = dict(tensors)
        for name, size in self.sizes.items():
            for tensor, dims in size.inputs.items():
                zeros = size.padding == "mask" and tensor in self.masks
                for dim in dims:
                    found[tensor] = padded(found[tensor], dim, sizes[name], zeros=zeros)
        return found

    def cut(
        self, outputs: Mapping[str, torch.Tensor], sizes: Sizes, made: Sizes
    ) -> dict[str, torch.Tensor]:
        """What a call of ``sizes`` gets of the outputs of a program of the sizes ``made``."""
        found = dict(outputs)
        for name, size in self.sizes.items():
            if sizes[name] == made[name]:
                continue
            for tensor, dims in size.outputs.items():
                for dim in dims:
                    length = found[tensor].shape[dim] // made[name] * sizes[name]
                    found[tensor] = found[tensor].narrow(dim, 0, length)
        return found

    def __str__(self) -> str:
        return "\n".join(_described(name, size) for name, size in self.sizes.items())


def sizes_text(sizes: Sizes) -> str:
    """``batch=8,length=64``: also the name of a program's file."""
    return ",".join(f"{name}={size}" for name, size in sizes.items())


def fits(sizes: Sizes, least: Sizes) -> bool:
    """Whether a call's sizes are none below the least that a program runs."""
    return all(size >= least[name] for name, size in sizes.items())


def padded(tensor: torch.Tensor, dim: int, size: int, *, zeros: bool = False) -> torch.Tensor:
    """A tensor with zeros, or else copies of its last slice, behind it along a dimension."""
    missing = size - tensor.shape[dim]
    if missing <= 0:
        return tensor
    last = tensor.narrow(dim, tensor.shape[dim] - 1, 1)
    shape = [*tensor.shape]
    shape[dim] = missing
    added = torch.zeros_like(last) if zeros else last
    return torch.cat([tensor, added.expand(shape)], dim)


def _described(name: str, size: DynamicSize) -> str:
    """A line on one size."""
    where = ", ".join(f"{tensor}[{dim}]" for tensor, dims in size.inputs.items() for dim in dims)
    if size.padding is None:
        return f"{name} of {where}: a program for each size: {size.reason}"
    known = ", ".join(map(str, size.buckets)) or "powers of two"
    ends = [f"{tensor}[{dim}]" for tensor, dims in size.outputs.items() for dim in dims]
    cut = f"; {', '.join(ends)} cut" if ends else ""
    by = "copies of the last row" if size.padding == "rows" else "what the mask leaves out"
    return f"{name} of {where}: padded to {known} with {by}{cut}"
