"""What both ends know of a tensor that travels: shape, dtype, and how its elements lie in memory.

A spec works out once what follows from it, since every message asks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from shardwright.ir.dtypes import torch_dtype
from shardwright.ir.values import contiguous_strides
from shardwright.pipeline.schema import TensorInfo


@dataclass(frozen=True)
class TensorSpec:
    """Shape, dtype and layout of a tensor; ``strides`` in elements, None where contiguous."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...] | None = None

    @classmethod
    def of(cls, info: TensorInfo) -> TensorSpec:
        """The spec of a pipeline's tensor."""
        return cls(info.shape, torch_dtype(info.dtype), info.strides)

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """The strides, those of a contiguous tensor where it names none."""
        return contiguous_strides(self.shape) if self.strides is None else self.strides

    @cached_property
    def span(self) -> int:
        """Elements from the first to the last in memory, both included."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, self.steps, strict=True))

    @cached_property
    def overlaps(self) -> bool:
        """Whether two indices may share an element."""
        return _overlap(self.steps, self.shape)

    @cached_property
    def has_gaps(self) -> bool:
        """Whether there is memory between the elements that is not theirs."""
        return self.span > math.prod(self.shape) and not self.overlaps

    @cached_property
    def nbytes(self) -> int:
        """The bytes that travel: the memory from the first to the last element, without gaps."""
        elements = math.prod(self.shape) if self.has_gaps else self.span
        return elements * self.dtype.itemsize

    @cached_property
    def contiguous(self) -> TensorSpec:
        """The spec of the same tensor laid out contiguously."""
        return contiguous_spec(self.shape, self.dtype)


@lru_cache(maxsize=4096)
def contiguous_spec(shape: tuple[int, ...], dtype: torch.dtype) -> TensorSpec:
    """The spec of a contiguous tensor: the same each time, with all that was worked out of it."""
    return TensorSpec(tuple(shape), dtype)


def _overlap(strides: Sequence[int], shape: Sequence[int]) -> bool:
    reach = 0
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False
