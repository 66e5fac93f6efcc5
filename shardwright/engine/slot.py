"""One device slot loaded: its supertasks' programs, and the contents of its constants.

`compiler.tasks` makes the programs of a real one; to the engine they are callables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardwright.comm.transport import Membership, TensorSpec
from shardwright.comm.wire import conform
from shardwright.devices import DEVICE_KINDS
from shardwright.engine.program import SlotProgram
from shardwright.engine.walk import Does
from shardwright.errors import DeviceError
from shardwright.pipeline.schema import Device, Document, StateOrigin, TensorInfo

Run = Callable[[Sequence[Tensor]], list[Tensor]]
"""From a supertask's inputs to its outputs."""


@dataclass(frozen=True, slots=True)
class CompiledTask:
    """A supertask's program; ``first`` is that of the first microbatch, where it has another."""

    program: Run
    first: Run | None = None


# --- what stands in no file -----------------------------------------------------------------------


def storage_of(tensor: Tensor) -> int:
    """Which memory a tensor lies in."""
    return tensor.untyped_storage().data_ptr()


def copy_pairs(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy each even one to the next; one that lies in memory to be written to is cloned first."""
    news, olds = tensors[::2], tensors[1::2]
    written = {storage_of(old) for old in olds}
    moved = [(new, old) for new, old in zip(news, olds, strict=True) if not _are_one(new, old)]
    sources = [new.clone() if storage_of(new) in written else new for new, _ in moved]
    for source, (_, old) in zip(sources, moved, strict=True):
        old.copy_(source)
    return []


def _are_one(new: Tensor, old: Tensor) -> bool:
    return new.data_ptr() == old.data_ptr() and new.stride() == old.stride()


def _set_to_zero(tensors: Sequence[Tensor]) -> list[Tensor]:
    for tensor in tensors:
        tensor.zero_()
    return []


def _stack(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.stack(list(tensors))]


MOVES: Mapping[Does, Run] = {
    "copy": copy_pairs,
    "zero": _set_to_zero,
    "stack": _stack,
}
"""Programs of tasks that stand in no file."""


# --- a loaded slot --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoadedSlot:
    """What a `SlotEngine` runs.

    rank
        The position of the device in the file.
    tasks
        The programs of the supertasks that compute.
    moves
        Programs of what stands in no file.
    memberships
        Parts in operations, by supertask or relay.
    constants
        Contents by tensor name, on ``device``. Training steps change them in place.
    wholes
        Constants that are part of a named whole, and which part.
    """

    name: str
    rank: int
    device: torch.device
    program: SlotProgram
    tasks: Mapping[str, CompiledTask]
    moves: Mapping[Does, Run]
    memberships: Mapping[str, Membership]
    constants: dict[str, Tensor]
    wholes: Mapping[str, StateOrigin] = field(default_factory=dict)


def wholes_of(document: Document, constants: Iterable[str]) -> dict[str, StateOrigin]:
    """Which part of which named whole each constant is, leaving out those without a name."""
    found = {name: _whole_of(document.tensors[name]) for name in constants}
    return {name: whole for name, whole in found.items() if whole is not None}


def _whole_of(info: TensorInfo) -> StateOrigin | None:
    """The whole shape of a stored tensor is known where the file says it; else the part's end."""
    if info.value is None:
        return info.origin
    value = info.value
    shape = value.shape or tuple(end for _, end in value.placements)
    return StateOrigin(value.name, value.placements, shape)


def torch_device(name: str, device: Device) -> torch.device:
    """The device that a slot names. Raises DeviceError where this machine lacks it."""
    kind = DEVICE_KINDS[device.kind].torch
    if kind == "cpu":
        return torch.device(kind)
    if kind == "cuda":
        count = torch.cuda.device_count()
        if device.idx < count:
            return torch.device(kind, device.idx)
        raise DeviceError(
            f"device slot {name!r} is cuda {device.idx}, but this machine has {count} CUDA "
            "devices; run it where they are, or change the slot's kind to cpu in the file"
        )
    raise DeviceError(
        f"device slot {name!r} is of kind {device.kind!r}, which can be written, checked and shown "
        "but not run here; run it on the CPU with npu_as_cpu=True (--npu-as-cpu), or change the "
        "slot's kind to cpu or cuda in the file"
    )


# --- values -------------------------------------------------------------------------------------


class ValueOps:
    """What an engine does with values itself: of a run, with tensors.

    They are opaque to it otherwise; the simulator has values and operations of its own.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def space(self) -> dict[str, Any]:
        """Where values of a microbatch, or of a step, are kept by name."""
        return {}

    def place(self, value: Any) -> Any:
        """An input, on the slot's device."""
        return value.to(self._device)

    def split(self, value: Any, spec: TensorSpec, parts: int) -> Sequence[Any]:
        """An input's microbatches, along its leading dimension."""
        return [conform(part, spec) for part in value.unbind()]

    def storage(self, value: Any) -> object:
        """Which memory a value lies in."""
        return storage_of(value)

    def own(self, value: Any) -> Any:
        """The value in memory of its own."""
        return value.clone()

    def replace(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        """Give constants new contents, behind a call: pairs of a new value and a constant.

        They keep their memory, which other programs know.
        """
        copy_pairs([value for pair in pairs for value in pair])
