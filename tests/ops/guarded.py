"""Memory between pages that may not be touched: whoever reads beside it ends the process."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor


class Guarded:
    """Memory that ends, or begins, at a page that may not be touched."""

    def __init__(self, before: bool) -> None:
        self.before = before
        self._maps: list[mmap.mmap] = []

    def __enter__(self) -> Guarded:
        return self

    def __exit__(self, *raised: object) -> None:
        """The memory goes when the tensors on it do."""
        self._maps.clear()

    def zeros(self, size: int, dtype: torch.dtype) -> Tensor:
        """So many zeros."""
        count, page = size * dtype.itemsize, mmap.PAGESIZE
        if not count:
            return torch.zeros(0, dtype=dtype)
        room = -(-count // page) * page
        memory = mmap.mmap(-1, room + 2 * page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._maps.append(memory)
        begin = page if self.before else page + room - count
        found = torch.frombuffer(memory, dtype=dtype, offset=begin, count=size)
        base = found.data_ptr() - begin
        for start in (base, base + page + room):
            if _LIBC.mprotect(ctypes.c_void_p(start), page, 0):
                raise OSError(ctypes.get_errno(), "mprotect")
        return found


_LIBC = ctypes.CDLL(None, use_errno=True)
