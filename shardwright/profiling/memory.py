"""How many bytes something needs at most while it runs.

On CUDA the allocator says it. On a CPU the allocator reports each storage that it gives and takes
back, those that operators make for themselves among them, and the reports are added up. torch hands
them out through the oldest of its profilers alone, which is cheap. Its warnings of memory from
before that is given back, which does not count, are kept quiet.

Invariant: memory that was there before is not counted, even where results lie in it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from threading import Lock
from typing import NamedTuple

import torch

from shardwright.torch_internals import begin_memory_reports, end_memory_reports, log_level

ERROR = 2
"""The level of torch's messages above warnings."""


class Peak(NamedTuple):
    """Bytes beyond what was there before: the most at once, and what the result leaves."""

    most: int
    left: int


def peak_bytes(call: Callable[[], object], device: torch.device) -> Peak:
    """What a call needs beyond what is there before it. Its result counts as left."""
    return _cuda_peak(call, device) if device.type == "cuda" else _cpu_peak(call)


def _cuda_peak(call: Callable[[], object], device: torch.device) -> Peak:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = call()
    torch.cuda.synchronize(device)
    most = torch.cuda.max_memory_allocated(device) - before
    left = torch.cuda.memory_allocated(device) - before
    del result
    return Peak(most, left)


def _cpu_peak(call: Callable[[], object]) -> Peak:
    """By the allocator's reports of this thread, which computes backwards too."""
    begin_counting()
    try:
        result = call()
    finally:
        peak = end_counting()
    del result
    return peak


def begin_counting() -> None:
    """Have the CPU's allocator report to this thread until `end_counting`."""
    begin_memory_reports()
    _QUIET.begin()


def end_counting() -> Peak:
    """What was needed since `begin_counting`, beyond what was there then."""
    changes = end_memory_reports()
    _QUIET.end()
    return Peak(max(accumulate(changes, initial=0)), sum(changes))


class _Quiet:
    """While memory is counted, torch prints no warnings of its C++."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._users = 0
        self._level = 0

    def begin(self) -> None:
        """Somebody begins to count."""
        level = log_level()
        with self._lock:
            self._users += 1
            if level is not None and self._users == 1:
                self._level, level.value = level.value, max(level.value, ERROR)

    def end(self) -> None:
        """Somebody is done."""
        level = log_level()
        with self._lock:
            self._users -= 1
            if level is not None and not self._users:
                level.value = self._level


_QUIET = _Quiet()
