"""One device slot's part of a pipeline, made ready to run.

In come a checked document, a slot's name and the contents of its constants; out comes a
`SlotProgram`: its supertasks in file order (`slot_steps`) as `Instruction`s, with graphs compiled
(`compiling`) and communication looked up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardwright.comm.transport import Membership, memberships
from shardwright.engine.compiling import Compiled, Run, compile_tasks
from shardwright.engine.slot_steps import SlotStep, SlotSteps, slot_steps
from shardwright.engine.timeline import EventKind
from shardwright.errors import DeviceError
from shardwright.pipeline.graphs import TaskGraphs
from shardwright.pipeline.schema import Device, Document, StateOrigin, TensorInfo

_EVENT_KINDS: dict[str, EventKind] = {
    "FX": "compute",
    "dfg": "compute",
    "send": "send",
    "recv": "recv",
}


@dataclass(frozen=True, slots=True)
class Instruction:
    """A supertask as data, with either its programs or its place in a communication.

    kind
        What its events are called; None for work that stands in no file and has none.
    nbytes
        What a communication gives, or what a recv gets.
    first
        The program of a step's first microbatch, where accumulators count as zeros.
    """

    of: SlotStep
    kind: EventKind | None
    program: Run | None = None
    first: Run | None = None
    membership: Membership | None = None
    nbytes: int = 0

    @property
    def task(self) -> str:
        """The supertask's name."""
        return self.of.task

    @property
    def inputs(self) -> tuple[str, ...]:
        """The tensors that it reads."""
        return self.of.inputs

    @property
    def outputs(self) -> tuple[str, ...]:
        """The tensors that it makes."""
        return self.of.outputs

    @property
    def dead(self) -> tuple[str, ...]:
        """Tensors of the call that no later step needs."""
        return self.of.dead

    @property
    def tensor(self) -> str | None:
        """The tensor that a communication is about."""
        return next(iter((*self.inputs, *self.outputs)), None) if self.membership else None


@dataclass(frozen=True, slots=True)
class SlotProgram:
    """What a worker needs to run one slot.

    plain
        The slot's steps as data, what it gives, and what it replaces.
    constants
        Contents by tensor name, on ``device``. The worker changes what ``replaces`` names.
    wholes
        Constants that are part of a named whole, and which part: what `state` speaks of.
    """

    name: str
    rank: int
    device: torch.device
    plain: SlotSteps
    steps: tuple[Instruction, ...]
    constants: dict[str, Tensor]
    wholes: dict[str, StateOrigin] = field(default_factory=dict)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The pipeline outputs that are made here."""
        return self.plain.outputs

    @property
    def replaces(self) -> Mapping[str, str]:
        """Produced tensor to the constant that it becomes; in a call, when that is over."""
        return self.plain.replaces


def make_slot(
    document: Document, name: str, constants: Mapping[str, Tensor], *, fixed: bool = False
) -> SlotProgram:
    """Compile a slot. Raises GraphError, ExecError, DeviceError.

    ``fixed`` promises that nobody changes constants but the slot's own programs.
    """
    graphs = TaskGraphs(document)
    plain = slot_steps(document, name, graphs)
    device = torch_device(name, document.devices[name])
    compiled = compile_tasks(document, plain.overwriting, device, graphs, fixed=fixed)
    return SlotProgram(
        name=name,
        rank=list(document.devices).index(name),
        device=device,
        plain=plain,
        steps=_steps(document, plain, compiled),
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


def storage_of(tensor: Tensor) -> int:
    """Which memory a tensor lies in."""
    return tensor.untyped_storage().data_ptr()


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


def _steps(
    document: Document, slot: SlotSteps, compiled: Mapping[str, Compiled]
) -> tuple[Instruction, ...]:
    parts = memberships(document)
    steps = []
    for step in slot.steps:
        kind = _EVENT_KINDS.get(document.supertasks[step.task].kind, "collective")
        if step.communicates:
            part = parts[step.task]
            steps.append(Instruction(step, kind, membership=part, nbytes=_moved_bytes(part)))
        else:
            found = compiled[step.task]
            steps.append(Instruction(step, kind, found.program, found.first))
    return tuple(steps)


def _moved_bytes(membership: Membership) -> int:
    """The bytes that a member gives; those it gets where it is a pair's receiver."""
    operation, member = membership.operation, membership.member
    spec = operation.inputs[member]
    if operation.kind == "send":
        spec = operation.gotten(1)
    return spec.nbytes if spec is not None else 0
