"""Kinds of devices: what torch calls each, and whose kernels it runs."""

from __future__ import annotations

from typing import Literal, NamedTuple

DeviceKind = Literal["cpu", "npu", "cuda"]
"""What a pipeline file, a cluster and a build name; ``cuda`` extends the specification's two."""


class DeviceKindRow(NamedTuple):
    """A kind of device.

    torch
        torch's type of such devices; None where they can be written down but not run.
    kernels
        The kind whose kernels lowered tasks of such devices call.
    """

    torch: Literal["cpu", "cuda"] | None
    kernels: Literal["cpu", "cuda"]


DEVICE_KINDS: dict[DeviceKind, DeviceKindRow] = {
    "cpu": DeviceKindRow("cpu", "cpu"),
    "npu": DeviceKindRow(None, "cpu"),
    "cuda": DeviceKindRow("cuda", "cuda"),
}
