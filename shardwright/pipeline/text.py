"""A pipeline as text that a person reads at a glance: devices, their constants, their supertasks.

pipeline mlp: 2 devices, 9 tensors (4 constants, 1.2 kB), 6 supertasks
  input   x f32[4, 8] on d0
  output  y f32[4, 2] on d1
d0  cpu:0, 2 constants, 640 B
  d0.0          FX    (x, 2 constants) -> (h)
  send.h.d0.d1  send  h f32[4, 16] -> d1
d1  cpu:1, 2 constants, 560 B
  recv.h.d0.d1  recv  h@d1 f32[4, 16] <- d0
  d1.0          FX    (h@d1, 2 constants) -> (y)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import get_args

from shardwright.communication import COMMUNICATION
from shardwright.ir.tensor_meta import format_bytes
from shardwright.pipeline.connections import Connections, connect
from shardwright.pipeline.rules import MICROBATCH_PHASES
from shardwright.pipeline.schema import (
    Device,
    Document,
    Phase,
    Placements,
    SuperTask,
    TensorInfo,
)

PHASES: tuple[Phase, ...] = get_args(Phase)


def format_pipeline(document: Document) -> str:
    """The text of a pipeline that is known to be right."""
    return "\n".join(_lines(document, connect(document)))


def _lines(document: Document, connections: Connections) -> Iterator[str]:
    constants = [info for info in document.tensors.values() if info.is_constant]
    yield (
        f"pipeline {document.name}: {_count(len(document.devices), 'device')}, "
        f"{_count(len(document.tensors), 'tensor')} ({_stored(constants)}), "
        f"{_count(len(document.supertasks), 'supertask')}"
    )
    yield from (f"  {line}" for line in training_lines(document, connections))
    slices = document.metadata.tensor_slices
    for label, side in (("input ", slices.inputs), ("output", slices.outputs)):
        for name, piece in side.items():
            originals = getattr(document.metadata.tensors, f"{label.strip()}s")
            taken = format_slice(piece.origin, piece.placements, originals[piece.origin].shape)
            part = "" if taken == piece.origin else f", {taken}"
            yield f"  {label}  {_tensor(document, name)} on {piece.device}{part}"
    width = max((len(name) for names in connections.order.values() for name in names), default=0)
    kinds = max((len(task.kind) for task in document.supertasks.values()), default=0)
    for device, tasks in connections.order.items():
        here = [
            document.tensors[name]
            for name, place in connections.devices.items()
            if place == device and document.tensors[name].is_constant
        ]
        yield f"{device}  {_device(document.devices[device])}, {_stored(here)}"
        for name in tasks:
            task = document.supertasks[name]
            what = _communication if task.kind in COMMUNICATION else _computation
            yield f"  {name:{width}}  {task.kind:{kinds}}  {what(document, connections, task)}"


def training_lines(document: Document, connections: Connections) -> Iterator[str]:
    """How a training step runs: its schedule, its phases, and what replaces what in totals."""
    training = document.training
    if training is None or training.microbatches is None or training.schedule is None:
        return
    info, cut = training.schedule, training.microbatches
    yield (
        f"step    {_count(cut.n, 'microbatch', 'es')}, {info.kind} over "
        f"{_count(info.ranks, 'pipeline rank')} of {_count(info.chunks, 'stage')}: "
        f"{' | '.join(' '.join(slots) for slots in info.slots)}"
    )
    if cut.dim:
        yield f"cut     {', '.join(f'{name} along dim {dim}' for name, dim in cut.dim.items())}"
    phases = Counter(task.phase for task in document.supertasks.values() if task.phase)
    yield f"tasks   {', '.join(f'{phases[phase]} {phase}' for phase in PHASES if phases[phase])}"
    for often, tensors in _replaced(document, connections).items():
        stored = [info for info in tensors if info.init is None]
        zeros = [info for info in tensors if info.init is not None]
        parts = [
            f"{len(found)} {what} ({format_bytes(sum(info.nbytes for info in found))})"
            for what, found in (("stored", stored), ("begun with zeros", zeros))
            if found
        ]
        yield f"new     each {often}: {', '.join(parts)}"
    yield from (f"note    {note}" for note in training.notes)


def _replaced(document: Document, connections: Connections) -> dict[str, list[TensorInfo]]:
    """The constants that are replaced, by how often."""
    assert document.training is not None
    found: dict[str, list[TensorInfo]] = {}
    for new, old in document.training.replaces.items():
        maker = document.supertasks[connections.producers[new][0]]
        often = "microbatch" if maker.phase in MICROBATCH_PHASES else "step"
        found.setdefault(often, []).append(document.tensors[old])
    return found


def _count(count: int, noun: str, plural: str = "s") -> str:
    return f"{count} {noun}" + ("" if count == 1 else plural)


def _stored(constants: Sequence[TensorInfo]) -> str:
    return f"{_count(len(constants), 'constant')}, {format_bytes(sum(i.nbytes for i in constants))}"


def format_slice(origin: str, placements: Placements, shape: Sequence[int]) -> str:
    """A part of a tensor: ``x[0:2, :]``; just ``x`` where it is all of it."""
    ranges = [
        ":" if taken == (0, size) else f"{taken[0]}:{taken[1]}"
        for taken, size in zip(placements, shape, strict=True)
    ]
    return origin if set(ranges) <= {":"} else f"{origin}[{', '.join(ranges)}]"


def _device(device: Device) -> str:
    host = f" on {device.host}" if device.host else ""
    pes = f" pes {', '.join(map(str, device.pes))}" if device.pes else ""
    return f"{device.kind}:{device.idx}{pes}{host}"


def _tensor(document: Document, name: str) -> str:
    info = document.tensors[name]
    return f"{name} {info.dtype}{list(info.shape)}"


def _computation(document: Document, _: Connections, task: SuperTask) -> str:
    names = [name for name in task.inputs if not document.tensors[name].is_constant]
    constants = len(task.inputs) - len(names)
    if constants:
        names.append(_count(constants, "constant"))
    return f"({', '.join(names)}) -> ({', '.join(task.outputs)})"


def _communication(document: Document, connections: Connections, task: SuperTask) -> str:
    assert task.group is not None
    members = [document.supertasks[name] for name in connections.groups[task.group]]
    others = ", ".join(str(member.device) for member in members if member.device != task.device)
    made = [_tensor(document, name) for name in (*task.inputs, *task.outputs)]
    if task.kind in ("send", "recv"):
        return f"{made[0]} {'->' if task.kind == 'send' else '<-'} {others}"
    options = "".join(f", {key}={item}" for key, item in (task.metadata or {}).items())
    return f"{' -> '.join(made)} with {others}{options}"
