"""A plan's memory at run time: the arena, the external tensors, and values seen in them.

Comes in: a plan, and tensors for its external buffers. Goes out: base addresses for native calls,
and for any value a tensor that lies in its home (its slot). What always holds: a slot is a view,
never a copy; no slot needs a gradient; a slot that was handed out stays right until its buffer gets
another address.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping

import torch

from shardwright.compiler.exec_plan import ExecPlan
from shardwright.compiler.placement import ARENA, Home
from shardwright.errors import ExecError
from shardwright.ir.tensor_meta import itemsize, torch_dtype
from shardwright.kernels.native.library import addresses


class Memory(Mapping[int, torch.Tensor]):
    """Slots by value id, made when they are asked for."""

    def __init__(self, plan: ExecPlan, device: torch.device) -> None:
        self._plan = plan
        self.device = device
        arena = torch.empty(max(plan.memory_bytes, 1), dtype=torch.uint8, device=device)
        self._held: list[torch.Tensor | None] = [arena, *[None] * (len(plan.buffers) - 1)]
        self._slots: dict[int, torch.Tensor] = {}
        self._members: dict[int, list[int]] = {}
        for vid, home in plan.homes.items():
            self._members.setdefault(home.buffer, []).append(vid)
        self.bases: ctypes.Array[ctypes.c_void_p] = addresses([None] * len(plan.buffers))
        self.bases[ARENA] = arena.data_ptr()
        self._layouts = {
            k: _layout(plan, buffer.vid) for k, buffer in enumerate(plan.buffers) if k != ARENA
        }
        self.version = [0] * len(plan.buffers)
        """How often each buffer got another address."""
        self.changes = 0
        """How often any did."""

    def hold(self, buffer: int, tensor: torch.Tensor) -> bool:
        """Let a buffer be this tensor's memory; whether its address is another than before."""
        address = tensor.data_ptr()
        held = self._held[buffer]
        self._held[buffer] = tensor
        if held is not None and self.bases[buffer] == (address or None):
            return False
        self.bases[buffer] = address
        self.version[buffer] += 1
        self.changes += 1
        for vid in self._members.get(buffer, ()):
            self._slots.pop(vid, None)
        if buffer != ARENA:
            self._slots[self._plan.buffers[buffer].vid] = tensor
        return True

    def release(self, buffer: int) -> None:
        """Let go of a buffer's memory: it must be held anew before it is read."""
        self._held[buffer] = None
        self.bases[buffer] = None
        for vid in self._members.get(buffer, ()):
            self._slots.pop(vid, None)

    def renew(self, buffer: int) -> None:
        """Let a buffer be new memory; what it was before is let go of first."""
        self.release(buffer)
        self.hold(buffer, self.own(buffer))

    def held(self, buffer: int) -> torch.Tensor | None:
        """The tensor that a buffer is; None before one is bound."""
        return self._held[buffer]

    def own(self, buffer: int) -> torch.Tensor:
        """New memory for a buffer, as large and as laid out as the plan says."""
        shape, strides, dtype = self._layouts[buffer]
        return torch.empty_strided(shape, strides, dtype=dtype, device=self.device)

    def __getitem__(self, vid: int) -> torch.Tensor:
        slot = self._slots.get(vid)
        if slot is None:
            slot = self._slots[vid] = self._seen(vid, self._plan.homes[vid])
        return slot

    def __iter__(self) -> Iterator[int]:
        return iter(self._plan.homes)

    def __len__(self) -> int:
        return len(self._plan.homes)

    def _seen(self, vid: int, home: Home) -> torch.Tensor:
        """The value's own view of its buffer."""
        tensor = self._held[home.buffer]
        spec = self._plan.lowered.values[vid]
        if tensor is None:
            raise ExecError(f"%{spec.name} lies in memory that was not bound; bind the feed first")
        size = itemsize(spec.dtype)
        begin = tensor.storage_offset() * tensor.element_size()
        seen = torch.empty(0, dtype=torch_dtype(spec.dtype), device=tensor.device)
        storage = tensor.untyped_storage()
        offset = (begin + home.offset) // size
        return seen.set_(storage, offset, home.shape, home.strides)


def _layout(plan: ExecPlan, vid: int) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    """Shape, strides and dtype of an external value."""
    spec = plan.lowered.values[vid]
    return spec.shape, plan.homes[vid].strides, torch_dtype(spec.dtype)
