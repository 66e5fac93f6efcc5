"""How much memory the process of a slot holds.

Linux counts it for what the process is now (``VmHWM``); the resource usage that other systems have
would count there what the process that started it held, too.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwright.runtime.slot import Slot

MEMORY = "shardwright.runtime.memory:peak_memory"

_STATUS = Path("/proc/self/status")
_UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes in what the kernel counts."""


def peak_memory(slot: Slot, arguments: Any, tensors: Mapping[str, Tensor]) -> int:
    """The most bytes that the slot's process has held: on its device if that is CUDA."""
    del arguments, tensors
    if slot.device.type == "cuda":
        return torch.cuda.max_memory_allocated(slot.device)
    return process_peak()


def process_peak() -> int:
    """The most bytes of main memory that this process has held."""
    lines = _STATUS.read_text().splitlines() if _STATUS.exists() else []
    counted = (line.split()[1] for line in lines if line.startswith("VmHWM:"))
    peak = next(counted, None) or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) * _UNIT
