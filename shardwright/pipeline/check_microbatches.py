"""Rules of training: how a step's batch is cut, and what lasts from one microbatch to the next."""

from __future__ import annotations

from shardwright.errors import PipelineError
from shardwright.pipeline.connections import Connections
from shardwright.pipeline.rules import MICROBATCH_PHASES, broken
from shardwright.pipeline.schema import (
    Document,
    MetadataTensorSlice,
    Microbatches,
)


def check_microbatches(document: Document, connections: Connections) -> None:
    """A step's batch is cut in equal parts, and what goes on to the next is replaced in order."""
    microbatches = document.training.microbatches if document.training else None
    if microbatches is not None:
        _check_dims(document, microbatches)
        _check_inputs(document, connections, microbatches)
        _check_outputs(document, connections, microbatches)
        _check_lasting(document, connections)


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


def _check_inputs(document: Document, connections: Connections, microbatches: Microbatches) -> None:
    """Who reads an input runs once a microbatch or once a step, and the slice is as large."""
    for tensor, piece in document.metadata.tensor_slices.inputs.items():
        users = connections.users.get(tensor, ())
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
            _check_first(microbatches, document, tensor, piece, "inputs")


def _check_outputs(
    document: Document, connections: Connections, microbatches: Microbatches
) -> None:
    """An output is made once a step, or once a microbatch and put together along its dimension."""
    for tensor, piece in document.metadata.tensor_slices.outputs.items():
        (producer,) = connections.producers[tensor]
        again = document.supertasks[producer].phase in MICROBATCH_PHASES
        if again and (piece.origin in microbatches.dim or microbatches.n == 1):
            _check_first(microbatches, document, tensor, piece, "outputs")
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
    microbatches: Microbatches,
    document: Document,
    tensor: str,
    piece: MetadataTensorSlice,
    side: str,
) -> None:
    """The slice is of microbatch 0."""
    dim = microbatches.dim.get(piece.origin)
    if dim is None:
        return
    size = getattr(document.metadata.tensors, side)[piece.origin].shape[dim] // microbatches.n
    if piece.placements[dim][1] > size:
        start, end = piece.placements[dim]
        raise broken(
            "microbatches",
            f"the slice takes [{start}, {end}) of dimension {dim}; that of microbatch 0 lies "
            f"inside [0, {size})",
            tensor=tensor,
        )


def _check_lasting(document: Document, connections: Connections) -> None:
    """A constant that is replaced once a microbatch is read only in the same work of a stage."""
    assert document.training is not None
    for new, old in document.training.replaces.items():
        maker = connections.producers[new][0]
        place = _place(document, maker)
        if place[0] == "prepare":
            raise _cannot_last(new, old, f"{maker!r} of phase prepare makes it")
        if place[0] == "update":
            continue
        for user in connections.users[old]:
            if _place(document, user) != place:
                raise _cannot_last(
                    new,
                    old,
                    f"{user!r} reads that in another phase or stage than {maker!r} replaces it",
                )


def _place(document: Document, name: str) -> tuple[str | None, int | None]:
    task = document.supertasks[name]
    return task.phase, task.stage


def _cannot_last(new: str, old: str, why: str) -> PipelineError:
    return broken("replaces", f"the tensor replaces constant {old!r}, but {why}", tensor=new)
