"""Memory that processes of one host share, in blocks that are released by their holders.

A rank lends blocks of its own `Arena`: a file in memory without a name, sparse, and so long that it
never has to grow. Others see it through a `Window`, made from the file's descriptor. Nothing of it
is in a file system; the kernel frees it when the last process that has it is gone, however that
came about.

A block is a header of one byte a rank, and content. A rank's byte is 0 as long as it holds the
block. A holder reads the content where it is, as a tensor, and lets go when nothing uses that
tensor's memory any more.

Invariant: blocks lie side by side and fill the file from its beginning; the owner lends one
again only when all have let go. Blocks of about one size take turns. Where a size has none left,
neighbours that are free are merged and the smallest that will do is split (best fit); the file
grows only where none will, and what is free in it then goes back to the system. So an arena takes
about the memory that a program has under way at its busiest.
"""

from __future__ import annotations

import mmap
import os
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwright.comm.transport import TensorSpec
from shardwright.comm.wire import spread, unpack, write
from shardwright.errors import RunError

_LINE = 64
"""Bytes of a cache line; headers and contents begin at multiples of it."""
_SLACK = 1 << 20
"""Bytes up to which an arena just grows: no memory that matters, and small messages stay fast."""
_ADDRESSES = 1 << 46
"""Bytes of addresses that a process can spare for the windows on all ranks, on 64-bit machines."""

_NUMPY_TYPES: dict[torch.dtype, Any] = {
    torch.float64: np.float64,
    torch.float32: np.float32,
    torch.float16: np.float16,
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.int16: np.int16,
    torch.int8: np.int8,
    torch.uint8: np.uint8,
    torch.uint16: np.uint16,
    torch.uint32: np.uint32,
    torch.uint64: np.uint64,
    torch.complex64: np.complex64,
    torch.complex128: np.complex128,
    torch.bool: np.bool_,
}
"""Dtypes of which numpy makes a tensor in one step; others are made of bytes."""


class Window:
    """The memory of one rank, as any process that has its file sees it."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, 0)
        self.bytes = memoryview(self._memory)

    def hold(self, offset: int, spec: TensorSpec, rank: int) -> Tensor:
        """The content of a block at ``offset`` as a tensor; in use, it is held by ``rank``."""
        numpy_type = _NUMPY_TYPES.get(spec.dtype) if spec.strides is None else None
        if numpy_type is None:
            held = self._held((spec.nbytes,), np.uint8, offset, rank)
            return unpack(torch.frombuffer(held, dtype=spec.dtype), spec)
        return torch.from_numpy(self._held(spec.shape, numpy_type, offset, rank))

    def give_back(self, start: int, end: int) -> bool:
        """Give whole pages to the system that lie there; says whether there were any."""
        start, end = _rounded(start, mmap.PAGESIZE), end // mmap.PAGESIZE * mmap.PAGESIZE
        if start >= end:
            return False
        self._memory.madvise(mmap.MADV_REMOVE, start, end - start)
        return True

    def content(self, offset: int, spec: TensorSpec) -> Tensor:
        """The content of a block at ``offset`` as a tensor for its owner to write."""
        count = spec.nbytes // spec.dtype.itemsize
        flat = torch.frombuffer(self._memory, dtype=spec.dtype, offset=offset, count=count)
        return spread(flat, spec)

    def _held(self, shape: tuple[int, ...], numpy_type: Any, offset: int, rank: int) -> _LentBlock:
        held = np.ndarray.__new__(_LentBlock, shape, numpy_type, self._memory, offset)
        held.window = self.bytes
        held.mark = _mark(offset, rank)
        return held


class _LentBlock(np.ndarray[Any, Any]):
    """The memory behind a tensor that shows a block; it lives as long as any view of it."""

    window: memoryview
    mark: int

    def __del__(self) -> None:
        self.window[self.mark] = 1


class Block:
    """A piece of an arena, from ``start`` to ``end``; ``offset`` is where its content begins.

    ``size`` is what it was cut for; 0 where it is what was left. ``is_hollow`` says that pages of
    it were given back.
    """

    __slots__ = (
        "_free",
        "_header",
        "_spec",
        "_target",
        "_window",
        "end",
        "is_hollow",
        "offset",
        "size",
        "start",
    )

    def __init__(
        self, window: Window, start: int, offset: int, end: int, size: int = 0, hollow: bool = False
    ) -> None:
        self.start = start
        self.offset = offset
        self.end = end
        self.size = size
        self.is_hollow = hollow
        self._window = window
        self._header = window.bytes[start:offset]
        self._header[:] = self._free = b"\1" * (offset - start)
        self._spec: TensorSpec | None = None
        self._target: Tensor | None = None

    def is_free(self) -> bool:
        """Whether all have let go."""
        return self._header == self._free

    def lend(self, holders: Collection[int]) -> None:
        """From now on ``holders`` hold it."""
        for rank in holders:
            self._header[_mark(0, rank)] = 0

    def give_back(self) -> None:
        """Give the memory of its content to the system, until it is cut again."""
        if not self.is_hollow:
            self.is_hollow = self._window.give_back(self.offset, self.end)

    def write(self, tensor: Tensor, spec: TensorSpec) -> None:
        """Copy a tensor into it, laid out as ``spec`` says."""
        if self._target is None or self._spec is not spec:
            self._spec, self._target = spec, self._window.content(self.offset, spec)
        write(tensor, self._target, spec)


class Arena:
    """A rank's own memory, for ``ranks`` that may hold blocks of it. Raises RunError."""

    def __init__(self, ranks: int) -> None:
        self._header = _rounded(ranks, _LINE)
        self._end = 0
        self._blocks: list[Block] = []
        self._of_size: defaultdict[int, list[Block]] = defaultdict(list)
        self._length = min(_physical_memory(), _ADDRESSES // ranks)
        self._file = os.fdopen(os.memfd_create("shardwright"), "rb")
        try:
            os.ftruncate(self.descriptor, self._length)
            self.window = Window(self.descriptor)
        except OSError as error:
            self.close()
            raise _no_memory(self._length, str(error)) from None

    @property
    def descriptor(self) -> int:
        """The file, to be handed to others for a `Window`."""
        return self._file.fileno()

    def lend(self, size: int, holders: Collection[int]) -> Block:
        """A block for ``size`` bytes, which ``holders`` hold from now on."""
        size = _rounded(size, max(_LINE, 1 << size.bit_length() >> 7))
        block = self._of_its_size(size) or self._cut(size)
        block.lend(holders)
        return block

    def close(self) -> None:
        """Give the descriptor back; windows and what they show stay as long as they are used."""
        self._file.close()

    def _of_its_size(self, size: int) -> Block | None:
        for block in self._of_size[size]:
            if block.is_free():
                return block
        return None

    def _cut(self, size: int) -> Block:
        """A block of that size, of memory that is sure to be there when it is written."""
        length = self._header + _rounded(size, _LINE)
        free = self._merge() if self._end + length > _SLACK else []
        fitting = [block for block in free if block.end - block.start >= length]
        if not fitting:
            return self._grow(size, length, free)
        old = min(fitting, key=lambda block: block.end - block.start)
        if old.is_hollow:
            self._allocate(old.start, old.start + length)
        rest = old.end - old.start - length
        end = old.end if rest < self._header + _LINE else old.start + length
        parts = [self._block(old.start, end, size)]
        if end < old.end:
            parts.append(self._block(end, old.end, hollow=old.is_hollow))
        place = self._blocks.index(old)
        self._blocks[place : place + 1] = parts
        self._of_size[size].append(parts[0])
        return parts[0]

    def _grow(self, size: int, length: int, free: Sequence[Block]) -> Block:
        """A block at the end of the file, with what is free there; other free memory goes back."""
        last = free[-1] if free and free[-1].end == self._end else None
        start = self._end if last is None else last.start
        for block in free:
            if block is not last:
                block.give_back()
        self._allocate(start, start + length)
        if last is not None:
            self._blocks.pop()
        self._end = start + length
        block = self._block(start, self._end, size)
        self._blocks.append(block)
        self._of_size[size].append(block)
        return block

    def _merge(self) -> list[Block]:
        """Make one block of free neighbours; gives those that are free, by their addresses."""
        blocks: list[Block] = []
        free: list[Block] = []
        for block in self._blocks:
            is_free = block.is_free()
            if is_free and free and blocks[-1] is free[-1]:
                before = free.pop()
                hollow = before.is_hollow or block.is_hollow
                block = self._block(before.start, block.end, hollow=hollow)
                blocks.pop()
            blocks.append(block)
            if is_free:
                free.append(block)
        self._blocks = blocks
        self._of_size.clear()
        for block in blocks:
            if block.size:
                self._of_size[block.size].append(block)
        return free

    def _block(self, start: int, end: int, size: int = 0, *, hollow: bool = False) -> Block:
        return Block(self.window, start, start + self._header, end, size, hollow)

    def _allocate(self, start: int, end: int) -> None:
        """Have the system keep memory for a part of the file. Raises RunError."""
        if end > self._length:
            raise _no_memory(end, f"it has {self._length / 2**20:,.0f} MiB for them in all")
        try:
            os.posix_fallocate(self.descriptor, start, end - start)
        except OSError as error:
            raise _no_memory(end, str(error)) from None


def _mark(offset: int, rank: int) -> int:
    """Where the byte of a rank is, in the header that ends at ``offset``."""
    return offset - 1 - rank


def _rounded(size: int, step: int) -> int:
    return -(-size // step) * step


def _physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _no_memory(size: int, reason: str) -> RunError:
    return RunError(
        f"this machine gives no {size / 2**20:,.0f} MiB of memory to share between workers "
        f"({reason}); set SHARDWRIGHT_TRANSPORT=gloo to send messages over sockets"
    )
