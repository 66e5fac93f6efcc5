"""Writing a session's state to checkpoints, and reading it from one.

Every worker writes what it owns (`shards`), the driver (rank 0 under torchrun) the rest: the index,
what of the program's state_dict no worker has, and where the run stands. A checkpoint is read by
each worker for itself, whatever mesh it was written on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from shardwright.engine.program import constants_of
from shardwright.engine.slot import LoadedSlot, wholes_of
from shardwright.errors import RunError
from shardwright.ir.tensor_meta import dtype_name
from shardwright.pipeline.schema import Document, Placements, StateOrigin
from shardwright.runtime.session import Session
from shardwright.training.checkpoint import (
    Checkpoints,
    Position,
    read_manifest,
    read_rates,
    write_manifest,
    write_rates,
)
from shardwright.training.dcp import (
    TensorPiece,
    WrittenPiece,
    read_pieces,
    write_index,
    write_pieces,
)
from shardwright.training.program import TrainingProgram


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where a checkpoint says that a run stood, and its learning rates."""

    position: Position
    rates: Mapping[str, Any]


class Saver:
    """Keeps the checkpoints of one run of a program in a directory.

    Raises RunError where a pipeline's state cannot be written.
    """

    def __init__(self, directory: str | Path, program: TrainingProgram, pipeline: Document) -> None:
        self.checkpoints = Checkpoints(directory)
        self._program = program
        self._owned = owned(pipeline)

    def save(
        self, session: Session, position: Position, rates: Mapping[str, Any], *, leads: bool
    ) -> None:
        """Write a checkpoint of the session as it is now; all ranks call it, one ``leads``.

        Raises WriteError where there is no room for it, and RunError; nothing is left of it then.
        """
        if leads:
            self.checkpoints.begin(position.step)
        try:
            self._write(session, position, rates, leads=leads)
        except BaseException:
            if leads:
                self.checkpoints.drop(position.step)
            raise

    def _write(
        self, session: Session, position: Position, rates: Mapping[str, Any], *, leads: bool
    ) -> None:
        path = self.checkpoints.unfinished(position.step)
        session.call_workers(MEET)
        arguments = {"directory": str(path.resolve()), "tensors": self._owned}
        answers = session.call_workers(SAVE, arguments)
        if leads:
            written = as_written(list(answers.values()))
            written += write_pieces(path, len(answers), self._rest())
            write_index(path, written, self._program.aliases())
            write_rates(path, rates)
            write_manifest(path, position, tuple(self._program.model))
            self.checkpoints.finish(path)

    def load(self, session: Session, path: Path) -> Resumed:
        """Give the session and the program the state of a checkpoint. Raises WeightError."""
        session.call_workers(LOAD, {"directory": str(path.resolve())})
        read_pieces(path, self._rest())
        return Resumed(read_manifest(path).position, read_rates(path))

    def _rest(self) -> dict[TensorPiece, Tensor]:
        """What of the program's state_dict no worker has."""
        return {
            TensorPiece.whole(name, tensor): tensor for name, tensor in self._program.rest.items()
        }


# --- who writes what ------------------------------------------------------------------------------
#
# Copies are written once, by the first slot that has them, so that the pieces of a whole lie side
# by side without overlap. `save_slot` and `load_slot` run on the workers.


SAVE = "shardwright.training.saving:save_slot"
MEET = "shardwright.training.saving:meet"
LOAD = "shardwright.training.saving:load_slot"


def owned(document: Document) -> dict[str, list[str]]:
    """The constants that each slot writes, by slot. Raises RunError where a whole has a hole."""
    found: dict[str, list[str]] = {slot: [] for slot in document.devices}
    for name, holders in _holders(document).items():
        shape = holders[0][2].shape
        chosen = _side_by_side(holders)
        covered = sum(_volume(whole.placements) for _, _, whole in chosen)
        if covered != math.prod(shape):
            raise RunError(
                f"the slots hold {covered} of the {math.prod(shape)} elements of {name!r} as "
                "pieces that fit together, so no checkpoint can be written; build the pipeline "
                "with another mesh"
            )
        for slot, tensor, _ in chosen:
            found[slot].append(tensor)
    return found


_Holder = tuple[str, str, StateOrigin]
"""A slot, its constant, and which part of the whole that is."""


def _holders(document: Document) -> dict[str, list[_Holder]]:
    """Who has parts of each named whole, in the order of the slots."""
    found: dict[str, list[_Holder]] = {}
    for slot in document.devices:
        for tensor, whole in wholes_of(document, constants_of(document, slot)).items():
            found.setdefault(whole.name, []).append((slot, tensor, whole))
    return found


def _side_by_side(holders: Sequence[_Holder]) -> list[_Holder]:
    """Parts that do not overlap: the first ones, or the largest where those leave a hole."""
    size = math.prod(holders[0][2].shape)
    for order in (holders, sorted(holders, key=lambda holder: -_volume(holder[2].placements))):
        chosen: list[_Holder] = []
        for holder in order:
            if not any(_overlap(holder[2], other[2]) for other in chosen):
                chosen.append(holder)
        if sum(_volume(whole.placements) for _, _, whole in chosen) == size:
            break
    return chosen


def _volume(placements: Placements) -> int:
    return math.prod(end - start for start, end in placements)


def _overlap(one: StateOrigin, other: StateOrigin) -> bool:
    """Whether two parts share an element, or begin alike, as an empty part and another may."""
    if all(a == c for (a, _), (c, _) in zip(one.placements, other.placements, strict=True)):
        return True
    return all(
        max(a, c) < min(b, d)
        for (a, b), (c, d) in zip(one.placements, other.placements, strict=True)
    )


# --- on the workers -------------------------------------------------------------------------


def meet(slot: LoadedSlot, arguments: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Do nothing: when this is over on all slots, all have come as far."""


def save_slot(
    slot: LoadedSlot, arguments: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> list[dict[str, Any]]:
    """Write the constants ``tensors[slot]`` to ``directory``; says where each lies."""
    del tensors
    mine = arguments["tensors"][slot.name]
    pieces = {_piece(slot, name): slot.constants[name] for name in mine}
    written = write_pieces(Path(arguments["directory"]), slot.rank, pieces)
    return [msgspec.to_builtins(entry) for entry in written]


def load_slot(
    slot: LoadedSlot, arguments: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Read all named constants of the slot from ``directory``. Raises WeightError."""
    del tensors
    contents = {
        _piece(slot, name): torch.empty_like(slot.constants[name], device="cpu")
        for name in slot.wholes
    }
    read_pieces(Path(arguments["directory"]), contents)
    for name in slot.wholes:
        slot.constants[name].copy_(contents[_piece(slot, name)])


def as_written(answers: Sequence[Sequence[Mapping[str, Any]]]) -> list[WrittenPiece]:
    """What `save_slot` said on each slot."""
    return [msgspec.convert(entry, WrittenPiece) for answer in answers for entry in answer]


def _piece(slot: LoadedSlot, name: str) -> TensorPiece:
    whole, tensor = slot.wholes[name], slot.constants[name]
    return TensorPiece(whole.name, whole.placements, whole.shape, dtype_name(tensor.dtype))
