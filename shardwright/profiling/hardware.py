"""What the devices of this machine call themselves."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

import torch

from shardwright.errors import DeviceError


def present_device(name: str | torch.device) -> torch.device:
    """The device ``cpu``, ``cuda`` or ``cuda:1``. Raises DeviceError where there is none."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) < count:
        return torch.device("cuda", device.index or 0)
    raise DeviceError(
        f"device {str(name)!r} cannot be measured: this machine has a CPU and {count} CUDA "
        "devices; name one of them, as cpu or cuda:0"
    )


@cache
def model_name(device: torch.device) -> str:
    """The model of a device, as the machine knows it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return _cpu_name()


def _cpu_name() -> str:
    """From Linux's own list of processors, else what Python knows."""
    listed = Path("/proc/cpuinfo")
    lines = listed.read_text().splitlines() if listed.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine() or "cpu"
