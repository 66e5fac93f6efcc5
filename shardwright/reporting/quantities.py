"""Types, devices and slots as people read them."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.ir.tensor_meta import tensor_text
from shardwright.pipeline.schema import Device, Document


def type_of(document: Document, name: str) -> str:
    """The type of a document's tensor."""
    info = document.tensors[name]
    return tensor_text(info.dtype, info.shape)


def device_text(device: Device) -> str:
    """``cpu:0``, with the host in front where the file names one."""
    place = f"{device.kind}:{device.idx}"
    return f"{device.host}/{place}" if device.host else place


def slots_text(slots: Sequence[str], order: Sequence[str]) -> str:
    """Device slots; from four on, those that are neighbours in ``order`` as ``d0 … d3``."""
    first = order.index(slots[0])
    run = len(slots) > 3 and list(slots) == list(order[first : first + len(slots)])
    return f"{slots[0]} … {slots[-1]}" if run else ", ".join(slots)
