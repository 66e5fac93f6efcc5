"""Rules of training steps: when supertasks run, what they read, and how a batch is cut.

A step goes through the phases ``prepare`` (once), ``forward``, ``backward`` and ``backward_weight``
(once a microbatch, stage by stage, as the schedule says) and ``update`` (once). The order of stages
and microbatches is `check_schedule`'s.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain

from shardwright.pipeline.check_tensors import cannot_replace
from shardwright.pipeline.connections import Connections
from shardwright.pipeline.rules import MICROBATCH_PHASES, READS, broken
from shardwright.pipeline.schema import (
    Document,
    MetadataTensorSlice,
    Microbatches,
    ScheduleInfo,
    SuperTask,
    Training,
)


def check_phases(index: Connections) -> None:
    """A training step is told whole: microbatches, schedule, and when each supertask runs."""
    training = index.document.training or Training()
    if (training.microbatches is None) != (training.schedule is None):
        pair = ("microbatches", "schedule")
        found, missing = pair if training.microbatches else reversed(pair)
        raise broken("phases", f"training has {found} but no {missing}; a step needs both")
    for name in index.on_devices():
        _check_presence(name, index.document.supertasks[name], training)
    if training.schedule is not None and training.microbatches is not None:
        _check_schedule(index.document, training.schedule)
        _check_stages(index, training.schedule)
        _check_reads(index, training.microbatches.n)


def _check_presence(name: str, task: SuperTask, training: Training) -> None:
    """A supertask has a phase in a training step, and a stage where it runs once a microbatch."""
    if training.microbatches is not None and task.phase is None:
        raise broken("phases", "the supertask of a training step has no phase", task=name)
    if training.microbatches is None and task.phase is not None:
        raise broken(
            "phases",
            f"the supertask has the phase {task.phase!r}, but the pipeline no "
            "training.microbatches; remove the one or add the other",
            task=name,
        )
    if task.stage is None and task.phase in MICROBATCH_PHASES:
        raise broken("stages", f"a supertask of phase {task.phase} needs a stage", task=name)
    if task.stage is not None and task.phase not in MICROBATCH_PHASES:
        when = f"of phase {task.phase}" if task.phase else "without a phase"
        raise broken("stages", f"a supertask {when} has no stage; remove it", task=name)


def _check_schedule(document: Document, info: ScheduleInfo) -> None:
    """The schedule's numbers go together, and each device slot is of one pipeline rank."""
    for key, found, expected in (
        ("slots", len(info.slots), info.ranks),
        ("placement", len(info.placement), info.ranks * info.chunks),
    ):
        if found != expected:
            raise broken(
                "schedule",
                f"training.schedule.{key} has {found} entries for {info.ranks} ranks of "
                f"{info.chunks} stages, expected {expected}",
            )
    stages = Counter(info.placement)
    if uneven := [rank for rank in range(info.ranks) if stages[rank] != info.chunks]:
        raise broken(
            "schedule",
            f"training.schedule.placement gives rank {uneven[0]} {stages[uneven[0]]} stages, "
            f"expected {info.chunks} on each rank",
        )
    listed = Counter(chain.from_iterable(info.slots))
    for device in {**document.devices, **listed}:
        if device not in document.devices or listed[device] != 1:
            times = f"{listed[device]} times" if device in document.devices else "and is no device"
            raise broken(
                "schedule",
                f"{device!r} stands in training.schedule.slots {times}; each device stands "
                "there once, with its pipeline rank",
            )


def _check_stages(index: Connections, info: ScheduleInfo) -> None:
    """A stage is one of the pipeline rank of its device."""
    ranks = {device: rank for rank, devices in enumerate(info.slots) for device in devices}
    for device, names in index.order.items():
        mine = {stage for stage, rank in enumerate(info.placement) if rank == ranks[device]}
        for name in names:
            stage = index.document.supertasks[name].stage
            if stage is not None and stage not in mine:
                raise broken(
                    "stages",
                    f"the stage is {stage}, but device {device!r} is of pipeline rank "
                    f"{ranks[device]}, which has {', '.join(map(str, sorted(mine)))}",
                    task=name,
                )


def _check_reads(index: Connections, microbatches: int) -> None:
    """Supertasks read what phases before theirs made, and after the microbatches only sums."""
    tasks = index.document.supertasks
    for name in index.on_devices():
        phase = tasks[name].phase
        assert phase is not None
        for tensor in tasks[name].inputs:
            producer = index.producer(tensor)
            made = tasks[producer].phase if producer else None
            if made is None or made in READS[phase]:
                continue
            if phase != "update":
                raise broken(
                    "phase-order",
                    f"a supertask of phase {phase} reads what {producer!r} of phase {made} "
                    "makes, which comes later in a step",
                    task=name,
                    tensor=tensor,
                )
            if microbatches > 1 and not _is_accumulated(index.document, tensor):
                raise broken(
                    "once-a-step",
                    f"the supertask runs once a step, {producer!r} once a microbatch; let it read "
                    "a sum over the microbatches: a tensor that replaces a constant with init",
                    task=name,
                    tensor=tensor,
                )


def _is_accumulated(document: Document, tensor: str) -> bool:
    """Whether a produced tensor goes on where the last microbatch left off, from zeros."""
    replaces = document.training.replaces if document.training else {}
    return tensor in replaces and document.tensors[replaces[tensor]].init is not None


# --- microbatches ---------------------------------------------------------------------------------


def check_microbatches(index: Connections) -> None:
    """A step's batch is cut in equal parts, and what goes on to the next is replaced in order."""
    training = index.document.training
    if training is not None and training.microbatches is not None:
        _check_dims(index.document, training.microbatches)
        _check_inputs(index, training.microbatches)
        _check_outputs(index, training.microbatches)
        _check_lasting(index, training)


def _check_dims(document: Document, microbatches: Microbatches) -> None:
    """Microbatches are equal parts of inputs and outputs of the original."""
    originals = document.metadata.tensors
    for name, dim in microbatches.dim.items():
        wholes = [side[name] for side in (originals.inputs, originals.outputs) if name in side]
        if not wholes:
            raise broken(
                "microbatches",
                "training.microbatches.dim names a tensor that is neither an input nor an output "
                "of the original",
                tensor=name,
            )
        for whole in wholes:
            if dim >= len(whole.shape) or whole.shape[dim] % microbatches.n:
                raise broken(
                    "microbatches",
                    f"the shape {list(whole.shape)} cannot be cut along dimension {dim} in "
                    f"{microbatches.n} equal microbatches",
                    tensor=name,
                )


def _check_inputs(index: Connections, microbatches: Microbatches) -> None:
    """Who reads an input runs once a microbatch or once a step, and the slice is as large."""
    document = index.document
    for tensor, piece in document.metadata.tensor_slices.inputs.items():
        users = index.users.get(tensor, ())
        again = [user for user in users if document.supertasks[user].phase in MICROBATCH_PHASES]
        if again and len(again) < len(users):
            once = next(user for user in users if user not in again)
            raise broken(
                "microbatches",
                f"{again[0]!r} reads the input once a microbatch, {once!r} once a step; give each "
                "a slice of its own",
                task=once,
                tensor=tensor,
            )
        if again:
            whole = document.metadata.tensors.inputs[piece.origin].shape
            _check_first(microbatches, tensor, piece, whole)


def _check_outputs(index: Connections, microbatches: Microbatches) -> None:
    """An output is made once a step, or once a microbatch and put together along its dimension."""
    metadata = index.document.metadata
    for tensor, piece in metadata.tensor_slices.outputs.items():
        (producer,) = index.producers[tensor]
        again = index.document.supertasks[producer].phase in MICROBATCH_PHASES
        if again and (piece.origin in microbatches.dim or microbatches.n == 1):
            _check_first(microbatches, tensor, piece, metadata.tensors.outputs[piece.origin].shape)
        elif again or piece.origin in microbatches.dim:
            when, has = ("microbatch", "no") if again else ("step", "a")
            raise broken(
                "microbatches",
                f"the output is made once a {when}, but its original {piece.origin!r} has {has} "
                "dimension in training.microbatches.dim",
                task=producer,
                tensor=tensor,
            )


def _check_first(
    microbatches: Microbatches, tensor: str, piece: MetadataTensorSlice, whole: tuple[int, ...]
) -> None:
    """The slice is of microbatch 0."""
    dim = microbatches.dim.get(piece.origin)
    if dim is None:
        return
    size = whole[dim] // microbatches.n
    start, end = piece.placements[dim]
    if end > size:
        raise broken(
            "microbatches",
            f"the slice takes [{start}, {end}) of dimension {dim}; that of microbatch 0 lies "
            f"inside [0, {size})",
            tensor=tensor,
        )


def _check_lasting(index: Connections, training: Training) -> None:
    """A constant that is replaced once a microbatch is read only in the same work of a stage."""
    tasks = index.document.supertasks
    for new, old in training.replaces.items():
        maker = index.producers[new][0]
        phase, stage = tasks[maker].phase, tasks[maker].stage
        if phase == "prepare":
            raise cannot_replace(new, old, f"{maker!r} of phase prepare makes it")
        for user in index.users[old] if phase != "update" else ():
            if (tasks[user].phase, tasks[user].stage) != (phase, stage):
                why = f"{user!r} reads that in another phase or stage than {maker!r} replaces it"
                raise cannot_replace(new, old, why)
