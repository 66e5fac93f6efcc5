"""One device slot loaded: its program, compiled, with the contents of its constants."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardwright.comm.transport import Membership, TensorSpec, memberships
from shardwright.comm.wire import conform
from shardwright.engine.instructions import Does
from shardwright.engine.program import Relay, SlotProgram, slot_program
from shardwright.engine.tasks import MOVES, CompiledTask, Run, compile_tasks, storage_of
from shardwright.errors import DeviceError
from shardwright.pipeline.graphs import TaskGraphs
from shardwright.pipeline.schema import Device, Document, StateOrigin, TensorInfo


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


def compile_slot(
    document: Document,
    name: str,
    constants: Mapping[str, Tensor],
    *,
    lookahead: int = 1,
    relays: Mapping[Relay, Membership] | None = None,
    fixed: bool = False,
) -> LoadedSlot:
    """Compile a slot. Raises GraphError, ExecError, DeviceError.

    ``relays`` are parts in operations that bring outputs of a step to other slots. ``fixed``
    promises that nobody changes constants but the slot's own programs.
    """
    graphs, relays = TaskGraphs(document), relays or {}
    program = slot_program(document, name, lookahead=lookahead, relays=(*relays,), graphs=graphs)
    device = torch_device(name, document.devices[name])
    return LoadedSlot(
        name=name,
        rank=list(document.devices).index(name),
        device=device,
        program=program,
        tasks=compile_tasks(document, program.memory, device, graphs, fixed=fixed),
        moves=MOVES,
        memberships=memberships(document) | {relay.task: part for relay, part in relays.items()},
        constants={key: tensor.to(device) for key, tensor in constants.items()},
        wholes=wholes_of(document, constants),
    )


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
    if device.kind == "cpu":
        return torch.device("cpu")
    if device.kind == "cuda":
        count = torch.cuda.device_count()
        if device.idx < count:
            return torch.device("cuda", device.idx)
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

    def replace(self, old: Any, new: Any) -> Any:
        """What a constant is behind a call that replaces it.

        A copy: the caller of an in-process run may write to the tensors it gets.
        """
        return new.clone()
