"""One arena for several executors that run one at a time."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from shardwright.compiler.memory import Memory
from shardwright.compiler.placement import ARENA


class SharedArena:
    """Memory that is as large as the largest plan needs.

    What always holds on the CPU: all memories that were lent it lie in one and the same. Where a
    larger plan comes, they get larger memory before the next run, and what was theirs lives on only
    in slots that somebody keeps. On a GPU, where recorded graphs know addresses, memory that was
    lent stays where it is, and those that come later get the larger one: `reserve` what all need.
    """

    def __init__(self, device: torch.device) -> None:
        self._arena = torch.empty(1, dtype=torch.uint8, device=device)
        self._borrowers: list[weakref.ref[Memory]] = []

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

    def lend(self, memory: Memory, nbytes: int) -> None:
        """Let a plan's memory have the arena, of which it needs so many bytes."""
        self.reserve(nbytes)
        memory.hold(ARENA, self._arena)
        self._borrowers = [*map(weakref.ref, self._living()), weakref.ref(memory)]

    def _new(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._arena.device)

    def _living(self) -> list[Memory]:
        """The memories that are still in use."""
        return [memory for found in self._borrowers if (memory := found()) is not None]
