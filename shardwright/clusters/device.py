"""What a device slot is: its memory, and how fast it computes.

`DEVICES` holds devices by name, each with where its numbers are from. A device's ``flops`` are what
its library reaches in large matrix products, not the peak that a data sheet names.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from shardwright.clusters.units import Quantity, check_seconds
from shardwright.devices import DeviceKind
from shardwright.errors import PlanError


class DeviceModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Capabilities of one device.

    memory
        Usable memory in bytes.
    flops
        float32 operations per second; a multiply-add counts as two.
    bandwidth
        Memory bandwidth in bytes per second.
    overhead
        Seconds to launch one operator.
    half_flops
        Operations per second in bfloat16 and float16; None if they are no faster than float32.
    """

    name: str
    kind: DeviceKind
    memory: int
    flops: float
    bandwidth: float
    overhead: float = 0.0
    half_flops: float | None = None

    def __post_init__(self) -> None:
        for name, quantity in FIGURES.items():
            if (number := getattr(self, name)) is not None:
                _check_figure(f"device {self.name!r}", name, quantity, number)


FIGURES: Mapping[str, Quantity] = {
    "memory": "bytes",
    "flops": "operations a second",
    "half_flops": "operations a second",
    "bandwidth": "bytes a second",
    "overhead": "seconds",
}
"""What a cluster file says of a device in numbers, in the order in which it is written."""


def _check_figure(device: str, name: str, quantity: Quantity, number: float) -> None:
    """Raise PlanError where no device has such a number."""
    if quantity == "seconds":
        if not number >= 0:
            raise PlanError(f"{device}: {name} must not be negative, found {number} s")
        check_seconds(f"{device}: {name}", number)
        return
    if not number > 0:
        raise PlanError(f"{device}: {name} must be positive, found {number}")
    if quantity != "bytes":
        check_seconds(f"{device}: what one of its {name} takes", 1 / number)


CPU_CORE = DeviceModel(
    "cpu-core",
    "cpu",
    memory=8 * 10**9,
    flops=165e9,
    bandwidth=25e9,
    overhead=3e-6,
    half_flops=1.1e12,
)
"""One core of a Xeon of 2023 (AVX-512, AMX), as measured with torch on one thread."""

REACHED_FLOPS = 0.8
"""How much of a GPU's peak large matrix products reach, about."""
REACHED_BANDWIDTH = 0.85
"""The same of its memory's."""


def _from_data_sheet(
    name: str, *, gigabytes: int, tflops: float, half_tflops: float, gigabytes_a_second: float
) -> DeviceModel:
    """A GPU of which the peaks are known; ``tflops`` are in float32, without TF32."""
    return DeviceModel(
        name,
        "cuda",
        memory=gigabytes * 10**9,
        flops=tflops * 1e12 * REACHED_FLOPS,
        bandwidth=gigabytes_a_second * 1e9 * REACHED_BANDWIDTH,
        overhead=5e-6,
        half_flops=half_tflops * 1e12 * REACHED_FLOPS,
    )


_SHEETS = (
    # NVIDIA's data sheets: V100 (SXM2, 2020), A100 (SXM, 2021), H100 (SXM, 2023), H200 (SXM, 2024);
    # in half precision those of tensor cores without sparsity.
    #                  GB   f32  half   GB/s
    ("V100-32GB", 32, 15.7, 125.0, 900.0),
    ("A100-40GB", 40, 19.5, 312.0, 1555.0),
    ("A100-80GB", 80, 19.5, 312.0, 2039.0),
    ("H100", 80, 67.0, 989.0, 3350.0),
    ("H200", 141, 67.0, 989.0, 4800.0),
)
DEVICES: Mapping[str, DeviceModel] = {CPU_CORE.name: CPU_CORE} | {
    name: _from_data_sheet(
        name, gigabytes=size, tflops=full, half_tflops=half, gigabytes_a_second=bandwidth
    )
    for name, size, full, half, bandwidth in _SHEETS
}
"""Devices by name; a cluster file may name one."""
