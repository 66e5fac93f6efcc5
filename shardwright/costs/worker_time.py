"""What a worker takes for a supertask beside the supertask itself: choosing it, its inputs, notes.

`prediction` and `simulation` count as much.
"""

from __future__ import annotations

from shardwright.clusters import DeviceModel

COMPUTING = 100e-6
"""Seconds where the worker's core is the device, as measured: with supertasks that fill the caches
130e-6, between tiny ones 70e-6."""
BESIDE = 10e-6
"""Seconds where the device computes meanwhile."""


def worker_seconds(device: DeviceModel) -> float:
    """Seconds for each supertask, of computing or of communication."""
    return COMPUTING if device.kind == "cpu" else BESIDE
