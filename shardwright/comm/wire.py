"""Tensors as bytes in memory, and back, without losing their strides.

Input: a tensor and the `TensorSpec` that both ends know; in between there is one flat buffer of
bytes; output: a tensor of that spec. Where the elements fill their memory without gaps, in
whatever order of dimensions, or lie over one another (an expanded tensor), the bytes are that
memory itself and neither end copies. A tensor with gaps travels packed.

Invariant: ``unpack(pack(conform(t, spec), spec), spec)`` equals ``t`` and has the
strides of ``spec``.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from shardwright.comm.transport import TensorSpec


def conform(tensor: Tensor, spec: TensorSpec) -> Tensor:
    """``tensor`` with the strides of ``spec``; itself where it has them.

    Conjugates and negatives that torch has yet to compute are computed: bytes do not tell.
    """
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if _same_layout(tensor, spec.steps):
        return tensor
    if spec.strides is None:
        return tensor.contiguous()
    memory = torch.empty(spec.span, dtype=spec.dtype, device=tensor.device)
    if spec.overlaps:
        places = torch.arange(spec.span, device=tensor.device).as_strided(spec.shape, spec.steps)
        _bits(memory)[places.reshape(-1)] = _bits(tensor.reshape(-1))
        return memory.as_strided(spec.shape, spec.steps)
    return memory.as_strided(spec.shape, spec.steps).copy_(tensor)


def pack(tensor: Tensor, spec: TensorSpec) -> Tensor:
    """The bytes of a tensor that has the strides of ``spec``: flat uint8, a view where possible."""
    if spec.has_gaps:
        return flat_bytes(tensor.contiguous())
    return tensor.as_strided((spec.span,), (1,)).view(torch.uint8)


def unpack(content: Tensor, spec: TensorSpec) -> Tensor:
    """The tensor whose `pack` is ``content``, flat bytes or elements; shares its memory if it can.

    It cannot where the spec has gaps.
    """
    flat = content if content.dtype == spec.dtype else content.view(spec.dtype)
    tensor = spread(flat, spec)
    return conform(tensor, spec) if spec.has_gaps else tensor


def spread(flat: Tensor, spec: TensorSpec) -> Tensor:
    """The elements that travel, from flat memory, in their shape."""
    strides = spec.contiguous.steps if spec.has_gaps else spec.steps
    return flat.as_strided(spec.shape, strides)


def write(tensor: Tensor, target: Tensor, spec: TensorSpec) -> None:
    """Copy a tensor of whatever strides into what `spread` has given of memory for ``spec``."""
    if spec.overlaps:
        memory = conform(tensor, spec).as_strided((spec.span,), (1,))
        target.as_strided((spec.span,), (1,)).copy_(memory)
    else:
        target.copy_(tensor)


def flat_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as flat uint8."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def memory_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, writable; the tensor lives as long as the view."""
    assert tensor.is_contiguous(), "only contiguous tensors have one block of memory"
    size = tensor.numel() * tensor.element_size()
    memory = (ctypes.c_char * size).from_address(tensor.data_ptr())
    memory.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


def _same_layout(tensor: Tensor, strides: tuple[int, ...]) -> bool:
    """Whether strides agree wherever a dimension has more than one element."""
    found = tensor.stride()
    if found == strides or 0 in tensor.shape:
        return True
    return all(size == 1 or a == b for size, a, b in zip(tensor.shape, found, strides, strict=True))


def _bits(tensor: Tensor) -> Tensor:
    """As signed integers of its size what has no indexed assignment."""
    same = _ASSIGNED.get(tensor.dtype)
    return tensor if same is None else tensor.view(same)


_ASSIGNED = {
    torch.float8_e4m3fn: torch.int8,
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}
