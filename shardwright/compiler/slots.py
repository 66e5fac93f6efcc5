"""A plan's memory at run time: the arena, the external tensors, and values seen in them.

A value's slot is a tensor over its allocation: a view, never a copy, which needs no gradient and
stays right until its buffer gets another address.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator, Mapping

import torch

from shardwright.compiler.memory.plan import ARENA, Allocation, ExecPlan
from shardwright.errors import ExecError
from shardwright.ir.tensor_meta import itemsize, torch_dtype
from shardwright.kernels.native.library import addresses


class PlanMemory(Mapping[int, torch.Tensor]):
    """Slots by value id, made when they are asked for."""

    def __init__(self, plan: ExecPlan, device: torch.device) -> None:
        self._plan = plan
        self.device = device
        arena = torch.empty(max(plan.memory_bytes, 1), dtype=torch.uint8, device=device)
        self._held: list[torch.Tensor | None] = [arena, *[None] * (len(plan.buffers) - 1)]
        self._slots: dict[int, torch.Tensor] = {}
        self._members: dict[int, list[int]] = {}
        for vid, allocation in plan.allocations.items():
            self._members.setdefault(allocation.buffer, []).append(vid)
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
            slot = self._slots[vid] = self._seen(vid, self._plan.allocations[vid])
        return slot

    def __iter__(self) -> Iterator[int]:
        return iter(self._plan.allocations)

    def __len__(self) -> int:
        return len(self._plan.allocations)

    def _seen(self, vid: int, allocation: Allocation) -> torch.Tensor:
        """The value's own view of its buffer."""
        tensor = self._held[allocation.buffer]
        spec = self._plan.lowered.values[vid]
        if tensor is None:
            raise ExecError(f"%{spec.name} lies in memory that was not bound; bind the feed first")
        size = itemsize(spec.dtype)
        begin = tensor.storage_offset() * tensor.element_size()
        seen = torch.empty(0, dtype=torch_dtype(spec.dtype), device=tensor.device)
        storage = tensor.untyped_storage()
        offset = (begin + allocation.offset) // size
        return seen.set_(storage, offset, allocation.shape, allocation.strides)


def _layout(plan: ExecPlan, vid: int) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    """Shape, strides and dtype of an external value."""
    spec = plan.lowered.values[vid]
    return spec.shape, plan.allocations[vid].strides, torch_dtype(spec.dtype)


class SharedArena:
    """PlanMemory that is as large as the largest plan needs.

    Invariant on the CPU: all memories that were lent it lie in one and the same. Where a
    larger plan comes, they get larger memory before the next run, and what was theirs lives on only
    in slots that are kept. On a GPU, where recorded graphs know addresses, memory that was
    lent stays where it is, and those that come later get the larger one: `reserve` what all need.
    """

    def __init__(self, device: torch.device) -> None:
        self._arena = torch.empty(1, dtype=torch.uint8, device=device)
        self._borrowers: list[weakref.ref[PlanMemory]] = []

    @property
    def nbytes(self) -> int:
        """How large it is."""
        return self._arena.numel()

    def reserve(self, nbytes: int) -> None:
        """Be at least so large."""
        if self.nbytes < nbytes:
            self._arena = self._new(nbytes)
            if self._arena.device.type == "cpu":
                for memory in self._living():
                    memory.hold(ARENA, self._arena)

    def lend(self, memory: PlanMemory, nbytes: int) -> None:
        """Let a plan's memory have the arena, of which it needs so many bytes."""
        self.reserve(nbytes)
        memory.hold(ARENA, self._arena)
        self._borrowers = [*map(weakref.ref, self._living()), weakref.ref(memory)]

    def _new(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._arena.device)

    def _living(self) -> list[PlanMemory]:
        """The memories that are still in use."""
        return [memory for found in self._borrowers if (memory := found()) is not None]
