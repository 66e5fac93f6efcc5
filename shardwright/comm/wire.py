"""Tensors as bytes in memory, and back, without losing their strides.

In comes a tensor and the `TensorSpec` that both ends know; in between there is one flat buffer of
bytes; out comes a tensor of that spec. Where the elements fill their memory without gaps, in
whatever order of dimensions, or lie over one another (an expanded tensor), the bytes are that
memory itself and neither end copies. A tensor with gaps travels packed.

What always holds: ``unpack(pack(conform(t, spec), spec), spec)`` equals ``t`` and has the
strides of ``spec``.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shardwright.comm.operation import TensorSpec
from shardwright.ir.values import contiguous_strides


def conform(tensor: Tensor, spec: TensorSpec) -> Tensor:
    """``tensor`` with the strides of ``spec``; itself where it has them."""
    strides = strides_of(spec)
    if _same_layout(tensor.shape, tensor.stride(), strides):
        return tensor
    if spec.strides is None:
        return tensor.contiguous()
    memory = torch.empty(span(spec), dtype=spec.dtype, device=tensor.device)
    if _overlaps(spec):
        places = torch.arange(span(spec), device=tensor.device).as_strided(spec.shape, strides)
        _bits(memory)[places.reshape(-1)] = _bits(tensor.reshape(-1))
        return memory.as_strided(spec.shape, strides)
    return memory.as_strided(spec.shape, strides).copy_(tensor)


def pack(tensor: Tensor, spec: TensorSpec) -> Tensor:
    """The bytes of a tensor that has the strides of ``spec``: flat uint8, a view where possible."""
    if is_packed(spec):
        return flat_bytes(tensor.contiguous())
    return tensor.as_strided((span(spec),), (1,)).view(torch.uint8)


def unpack(content: Tensor, spec: TensorSpec) -> Tensor:
    """The tensor whose `pack` is ``content``; shares its memory where possible."""
    flat = content.view(spec.dtype)
    if is_packed(spec):
        return conform(flat.view(spec.shape), spec)
    return flat.as_strided(spec.shape, strides_of(spec))


def wire_bytes(spec: TensorSpec) -> int:
    """How many bytes `pack` gives."""
    elements = math.prod(spec.shape) if is_packed(spec) else span(spec)
    return elements * spec.dtype.itemsize


def span(spec: TensorSpec) -> int:
    """Elements from the first to the last in memory, both included."""
    if 0 in spec.shape:
        return 0
    steps = zip(spec.shape, strides_of(spec), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps)


def is_packed(spec: TensorSpec) -> bool:
    """Whether the memory has gaps, so that only the elements themselves travel."""
    return span(spec) > math.prod(spec.shape) and not _overlaps(spec)


def strides_of(spec: TensorSpec) -> tuple[int, ...]:
    """The strides, those of a contiguous tensor where ``spec`` names none."""
    return contiguous_strides(spec.shape) if spec.strides is None else spec.strides


def flat_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as flat uint8."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def memory_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, writable; valid while the tensor lives."""
    assert tensor.is_contiguous(), "only contiguous tensors have one block of memory"
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


def _same_layout(shape: Sequence[int], found: Sequence[int], wanted: Sequence[int]) -> bool:
    """Whether strides agree wherever a dimension has more than one element."""
    if 0 in shape:
        return True
    return all(size == 1 or a == b for size, a, b in zip(shape, found, wanted, strict=True))


def _overlaps(spec: TensorSpec) -> bool:
    """Whether two indices may share an element."""
    reach = 0
    for stride, size in sorted(zip(strides_of(spec), spec.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


def _bits(tensor: Tensor) -> Tensor:
    """f8 as integers of its size, since it has no indexed assignment."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
