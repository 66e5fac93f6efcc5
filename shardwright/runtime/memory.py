"""How much memory a slot needs: what its process holds, and what its tensors do.

For the process, Linux counts it for what the process is now (``VmHWM``); the resource usage that
other systems have would count there what the process that started it held, too.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwright.engine.slot import LoadedSlot
from shardwright.profiling.memory import begin_counting, end_counting

MEMORY = "shardwright.runtime.memory:peak_memory"
COUNT_TENSORS = "shardwright.runtime.memory:count_tensors"
TENSORS = "shardwright.runtime.memory:peak_of_tensors"

_STATUS = Path("/proc/self/status")
_UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes in what the kernel counts."""


def peak_memory(slot: LoadedSlot, arguments: Any, tensors: Mapping[str, Tensor]) -> int:
    """The most bytes that the slot's process has held: on its device if that is CUDA."""
    del arguments, tensors
    if slot.device.type == "cuda":
        return torch.cuda.max_memory_allocated(slot.device)
    return process_peak()


def count_tensors(slot: LoadedSlot, arguments: Any, tensors: Mapping[str, Tensor]) -> None:
    """Count from now on what tensors need, until `peak_of_tensors` is asked for."""
    del arguments, tensors
    if slot.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(slot.device)
    else:
        begin_counting()


def peak_of_tensors(slot: LoadedSlot, arguments: Any, tensors: Mapping[str, Tensor]) -> int:
    """The most bytes that tensors needed since `count_tensors`: constants, and all made since.

    On a CPU without those that this thread does not make: messages, which stand where their sender
    has them, and inputs of the pipeline.
    """
    del arguments, tensors
    if slot.device.type == "cuda":
        return torch.cuda.max_memory_allocated(slot.device)
    storages = (tensor.untyped_storage() for tensor in slot.constants.values())
    held = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    return held + end_counting().most


def process_peak() -> int:
    """The most bytes of main memory that this process has held."""
    lines = _STATUS.read_text().splitlines() if _STATUS.exists() else []
    counted = (line.split()[1] for line in lines if line.startswith("VmHWM:"))
    peak = next(counted, None) or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) * _UNIT
