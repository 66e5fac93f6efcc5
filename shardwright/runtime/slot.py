"""One device slot's part of a pipeline, made ready to run.

In come a checked document, a slot's name and the contents of its constants; out comes a `Slot`: its
supertasks in file order as `Step`s, with graphs compiled and communication looked up.

What always holds: a slot knows only its own tensors; supertasks that share a graph and the shapes
they bind share one compiled program; each step says which tensors nothing needs after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.comm.operation import Membership, memberships
from shardwright.comm.wire import wire_bytes
from shardwright.errors import DeviceError, RunError
from shardwright.ir.execute import Program, compile_graph
from shardwright.pipeline.check_compute import data_of
from shardwright.pipeline.connections import connect
from shardwright.pipeline.fxtext import decode
from shardwright.pipeline.schema import Device, Document, TensorInfo
from shardwright.runtime.timeline import EventKind

_EVENT_KINDS: dict[str, EventKind] = {"FX": "compute", "send": "send", "recv": "recv"}


@dataclass(frozen=True, slots=True)
class Step:
    """A supertask: either a program or a communication.

    ``nbytes`` is what a communication gives, or what a recv gets; ``dead`` are tensors of the call
    that no later step needs.
    """

    task: str
    kind: EventKind
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    program: Program | None
    membership: Membership | None
    nbytes: int
    dead: tuple[str, ...]

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
        Produced tensor to the constant that it becomes when a call is over.
    """

    name: str
    rank: int
    device: torch.device
    steps: tuple[Step, ...]
    constants: dict[str, Tensor]
    outputs: tuple[str, ...]
    replaces: dict[str, str]


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
    )


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
    compiler = _Compiler(document, device)
    parts = memberships(document)
    steps: list[Step] = []
    alive = set(kept)
    for task in reversed(tasks):
        spec = document.supertasks[task]
        used = tuple(dict.fromkeys((*spec.inputs, *spec.outputs)))
        membership = parts.get(task)
        steps.append(
            Step(
                task=task,
                kind=_EVENT_KINDS.get(spec.kind, "collective"),
                inputs=spec.inputs,
                outputs=spec.outputs,
                program=compiler.compile(task) if membership is None else None,
                membership=membership,
                nbytes=_moved_bytes(membership) if membership is not None else 0,
                dead=tuple(tensor for tensor in used if tensor not in alive),
            )
        )
        alive.update(used)
    return tuple(reversed(steps))


def _moved_bytes(membership: Membership) -> int:
    """The bytes that a member gives; those it gets where it is a pair's receiver."""
    operation, member = membership.operation, membership.member
    spec = operation.inputs[member]
    if operation.kind == "send":
        spec = operation.gotten(1)
    return wire_bytes(spec) if spec is not None else 0


class _Compiler:
    """Compiles supertasks, equal ones once."""

    def __init__(self, document: Document, device: torch.device) -> None:
        self._document = document
        self._device = device
        self._programs: dict[tuple[str, tuple[object, ...]], Program] = {}

    def compile(self, task: str) -> Program:
        spec = self._document.supertasks[task]
        if spec.kind != "FX":
            raise RunError(
                f"supertask {task!r} is of kind {spec.kind!r}, which this version does not run; "
                "build the pipeline with FX supertasks"
            )
        inputs = [self._document.tensors[name] for name in spec.inputs]
        text = data_of(self._document, spec)
        key = (text, tuple((info.shape, info.dtype, info.strides) for info in inputs))
        if key not in self._programs:
            graph = decode(text, inputs, name=task)
            self._programs[key] = compile_graph(graph, self._device)
        return self._programs[key]
