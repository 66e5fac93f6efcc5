"""What a device slot is: its memory, and how fast it computes.

`DEVICES` holds devices by name, each with where its numbers are from. A device's ``flops`` are what
its library reaches in large matrix products, not the peak that a data sheet names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from shardwright.errors import PlanError


class DeviceModel(msgspec.Struct, frozen=True):
    """One device slot.

    memory
        Bytes that a slot may use.
    flops
        float32 operations a second, a multiply and an add being two.
    bandwidth
        Bytes a second of its memory.
    overhead
        Seconds that starting one operator takes.
    half_flops
        The same as ``flops`` in bfloat16 and float16; None where these are no faster.
    """

    name: str
    kind: Literal["cpu", "cuda", "npu"]
    memory: int
    flops: float
    bandwidth: float
    overhead: float = 0.0
    half_flops: float | None = None

    def __post_init__(self) -> None:
        positive = {
            "memory": self.memory,
            "flops": self.flops,
            "bandwidth": self.bandwidth,
            "half_flops": self.half_flops,
        }
        for field, number in positive.items():
            if number is not None and not number > 0:
                raise PlanError(f"device {self.name!r}: {field} must be positive, found {number}")
        if not self.overhead >= 0:
            raise PlanError(
                f"device {self.name!r}: overhead must not be negative, found {self.overhead} s"
            )


CPU_CORE = DeviceModel(
    "cpu-core",
    "cpu",
    memory=8 * 10**9,
    flops=160e9,
    bandwidth=25e9,
    overhead=3e-6,
    half_flops=1.1e12,
)
"""One core of a Xeon of 2023 (AVX-512, AMX), as measured."""

DEVICES: Mapping[str, DeviceModel] = {device.name: device for device in (CPU_CORE,)}
