"""One device slot's part of a pipeline, made ready to run.

In come a checked document, a slot's name and the contents of its constants; out comes a `Slot`: its
supertasks in file order as `Step`s, with graphs compiled (`compiling`) and communication looked up.

What always holds: a slot knows only its own tensors; each step says which tensors nothing needs
after it in a call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shardwright.comm.operation import Membership, memberships
from shardwright.errors import DeviceError
from shardwright.pipeline.connections import connect
from shardwright.pipeline.schema import Device, Document, StateOrigin, TensorInfo
from shardwright.runtime.compiling import Run, compile_tasks
from shardwright.runtime.timeline import EventKind

_EVENT_KINDS: dict[str, EventKind] = {"FX": "compute", "send": "send", "recv": "recv"}


@dataclass(frozen=True, slots=True)
class Step:
    """A supertask: either a program or a communication.

    kind
        What its events are called; None for work that stands in no file and has none.
    nbytes
        What a communication gives, or what a recv gets.
    dead
        Tensors of the call that no later step needs.
    first
        The program of a step's first microbatch, where accumulators count as zeros.
    writes
        Constants that the program overwrites.
    sharing
        Outputs that may lie in the memory of constants which change, and those constants.
    """

    task: str
    kind: EventKind | None
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    program: Run | None
    membership: Membership | None = None
    nbytes: int = 0
    dead: tuple[str, ...] = ()
    first: Run | None = None
    writes: tuple[str, ...] = ()
    sharing: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @property
    def tensor(self) -> str | None:
        """The tensor that a communication is about."""
        return next(iter((*self.inputs, *self.outputs)), None) if self.membership else None


@dataclass(frozen=True, slots=True)
class Slot:
    """What a worker needs to run one slot.

    constants
        Contents by tensor name, on ``device``. The worker changes what ``replaces`` names.
    outputs
        The pipeline outputs that are made here.
    replaces
        Produced tensor to the constant that it becomes; in a call, when that is over.
    wholes
        Constants that are part of a named whole, and which part: what `state` speaks of.
    """

    name: str
    rank: int
    device: torch.device
    steps: tuple[Step, ...]
    constants: dict[str, Tensor]
    outputs: tuple[str, ...]
    replaces: dict[str, str]
    wholes: dict[str, StateOrigin] = field(default_factory=dict)


def constants_of(document: Document, slot: str) -> dict[str, TensorInfo]:
    """The constants that a slot's supertasks read, by name."""
    tasks = (document.supertasks[name] for name in connect(document).order[slot])
    return {
        name: document.tensors[name]
        for task in tasks
        for name in task.inputs
        if document.tensors[name].is_constant
    }


def make_slot(document: Document, name: str, constants: Mapping[str, Tensor]) -> Slot:
    """Compile a slot. Raises GraphError, DeviceError, and RunError for kinds that do not run."""
    connections = connect(document)
    device = torch_device(name, document.devices[name])
    outputs = tuple(
        tensor
        for task in connections.ends["output"]
        for tensor in document.supertasks[task].inputs
        if connections.devices[tensor] == name
    )
    replaces = document.training.replaces if document.training is not None else {}
    own = {new: old for new, old in replaces.items() if connections.devices[new] == name}
    kept = {*outputs, *own, *constants}
    return Slot(
        name=name,
        rank=list(document.devices).index(name),
        device=device,
        steps=_steps(document, connections.order[name], device, kept),
        constants={key: tensor.to(device) for key, tensor in constants.items()},
        outputs=outputs,
        replaces=own,
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
        "but not run here; change the slot's kind to cpu or cuda to run it"
    )


def _steps(
    document: Document, tasks: list[str], device: torch.device, kept: set[str]
) -> tuple[Step, ...]:
    parts = memberships(document)
    compiled = compile_tasks(document, [task for task in tasks if task not in parts], device)
    steps: list[Step] = []
    alive = set(kept)
    for task in reversed(tasks):
        spec = document.supertasks[task]
        used = tuple(dict.fromkeys((*spec.inputs, *spec.outputs)))
        dead = tuple(tensor for tensor in used if tensor not in alive)
        step = Step(
            task, _EVENT_KINDS.get(spec.kind, "collective"), spec.inputs, spec.outputs, None
        )
        if (found := compiled.get(task)) is not None:
            steps.append(replace(step, dead=dead, **found.fields()))
        else:
            part = parts[task]
            steps.append(replace(step, membership=part, nbytes=_moved_bytes(part), dead=dead))
        alive.update(used)
    return tuple(reversed(steps))


def _moved_bytes(membership: Membership) -> int:
    """The bytes that a member gives; those it gets where it is a pair's receiver."""
    operation, member = membership.operation, membership.member
    spec = operation.inputs[member]
    if operation.kind == "send":
        spec = operation.gotten(1)
    return spec.nbytes if spec is not None else 0
