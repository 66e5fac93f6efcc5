"""A directory of checkpoints: ``step_000100``, ``step_000200``, each whole or not there.

A checkpoint is written under ``step_000100.tmp`` and renamed when all of it is on the disk, so a
name without ``.tmp`` tells of a complete one; what was damaged later is found by its lengths and
passed over. The two latest are kept.

    step_000100/.metadata            torch's index: which piece lies where       (`dcp`)
    step_000100/__0_0.distcp         pieces that slot 0 wrote
    step_000100/training.json        where the run stood: `Manifest`
    step_000100/rates.pt             the learning rates and what their schedulers hold
"""

from __future__ import annotations

import io
import math
import os
import pickle
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor

from shardwright.atomic import read_whole, replacing
from shardwright.engine.program import constants_of
from shardwright.engine.slot import LoadedSlot, wholes_of
from shardwright.errors import RunError, WeightError, WriteError
from shardwright.ir.tensor_meta import dtype_name
from shardwright.pipeline.archive import check_stored
from shardwright.pipeline.schema import Document, Placements, StateOrigin
from shardwright.training.dcp import (
    TensorPiece,
    WrittenPiece,
    is_complete,
    read_pieces,
    write_index,
    write_pieces,
)

if TYPE_CHECKING:  # workers import this module, and need neither
    from shardwright.runtime.training_runner import TrainingRunner
    from shardwright.training.program import TrainingProgram

MANIFEST = "training.json"
RATES = "rates.pt"
VERSION = 1
KEPT = 2

_NAME = re.compile(r"step_(\d{6,})")
_UNFINISHED = ".tmp"


class Position(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a run stands: what has been done, and what comes next.

    step
        Steps done.
    epoch, batch
        The next batch: its number in which pass over the data.
    draws
        How many microbatches have drawn random numbers: the next value of the graph's ``rng``.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    draws: int = 0


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a checkpoint holds beside tensors; ``model`` are the names of the state_dict."""

    version: int
    position: Position
    model: tuple[str, ...]


class Checkpoints:
    """The checkpoints of one run; only one process at a time writes there."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)

    def complete(self) -> list[Path]:
        """The checkpoints that can be read, oldest first."""
        return [path for path in self._all() if _is_whole(path)]

    def latest(self) -> Path | None:
        """The last checkpoint that can be read; None where there is none."""
        return next((path for path in reversed(self._all()) if _is_whole(path)), None)

    def damaged(self) -> list[Path]:
        """The checkpoints behind the latest that have a name and cannot be read."""
        found: list[Path] = []
        for path in reversed(self._all()):
            if _is_whole(path):
                break
            found.append(path)
        return found

    def unfinished(self, step: int) -> Path:
        """Where the checkpoint of ``step`` is written before it has its name."""
        return self.directory / f"step_{step:06d}{_UNFINISHED}"

    def begin(self, step: int) -> Path:
        """An empty directory to write the checkpoint of ``step`` to. Raises RunError."""
        path = self.unfinished(step)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir()
        except OSError as error:
            raise RunError(
                f"no checkpoint can be written to {self.directory}: {error.strerror or error}"
            ) from None
        return path

    def drop(self, step: int) -> None:
        """Remove what was written of a checkpoint that will not be finished."""
        shutil.rmtree(self.unfinished(step), ignore_errors=True)

    def finish(self, unfinished: Path) -> Path:
        """Give a written checkpoint its name; remove all but the latest two, and what was left.

        What was left are unfinished checkpoints of runs that died. Raises WriteError.
        """
        path = unfinished.with_name(unfinished.name.removesuffix(_UNFINISHED))
        try:
            if path.exists():
                shutil.rmtree(path)
            _sync(unfinished)
            os.rename(unfinished, path)
            _sync(self.directory)
        except OSError as error:
            raise WriteError(error.errno, error.strerror, str(path)) from None
        for old in (*self.complete()[:-KEPT], *self.directory.glob(f"step_*{_UNFINISHED}")):
            shutil.rmtree(old, ignore_errors=True)
        return path

    def _all(self) -> list[Path]:
        if not self.directory.is_dir():
            return []
        found = [path for path in self.directory.iterdir() if _NAME.fullmatch(path.name)]
        return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))


def find_checkpoint(path: str | Path) -> Path:
    """The checkpoint that a path names: itself, or the latest of a directory of them.

    Raises WeightError where there is none that can be read.
    """
    path = Path(path)
    if (path / MANIFEST).is_file():
        return path
    latest = Checkpoints(path).latest()
    if latest is None:
        raise WeightError(f"{path} holds no complete checkpoint, step_000001 or the like")
    return latest


def write_manifest(path: Path, position: Position, model: tuple[str, ...]) -> None:
    """Say in a checkpoint where the run stood."""
    manifest = Manifest(VERSION, position, model)
    _write(path / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))


def read_manifest(path: Path) -> Manifest:
    """What a checkpoint says of itself. Raises WeightError."""
    try:
        manifest = msgspec.json.decode(read_whole(path / MANIFEST), type=Manifest)
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WeightError(f"{path / MANIFEST} cannot be read: {error}") from None
    if manifest.version != VERSION:
        raise WeightError(
            f"{path} is a checkpoint of version {manifest.version}; this release reads {VERSION}"
        )
    return manifest


def write_rates(path: Path, state: Mapping[str, Any]) -> None:
    """Keep the state of `Rates`. Raises RunError where reading it back would run code."""
    content = io.BytesIO()
    try:
        torch.save(dict(state), content)
        content.seek(0)
        torch.load(content, weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError) as error:
        raise RunError(
            "the scheduler's state_dict holds objects that a checkpoint cannot keep "
            f"({str(error).splitlines()[0]}); give a function from step to factor as scheduler="
        ) from None
    _write(path / RATES, content.getvalue())


def read_rates(path: Path) -> dict[str, Any]:
    """The state of `Rates` in a checkpoint. Raises WeightError."""
    try:
        check_stored(path / RATES)
        state = torch.load(path / RATES, weights_only=True)
    except Exception as error:  # readers of a damaged file raise whatever they run into
        reason = str(error).split("\n", 1)[0] or type(error).__name__
        raise WeightError(f"{path / RATES} cannot be read: {reason}") from None
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        raise WeightError(f"{path / RATES} holds no rates; the checkpoint is damaged")
    return state


def _is_whole(path: Path) -> bool:
    try:
        read_manifest(path)
        read_rates(path)
    except WeightError:
        return False
    return is_complete(path)


def _write(file: Path, content: bytes) -> None:
    with replacing(file) as temporary, temporary.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def _sync(directory: Path) -> None:
    """Have the kernel write what names a directory holds."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- state of a session ---------------------------------------------------------------------------


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
        self,
        session: TrainingRunner,
        position: Position,
        rates: Mapping[str, Any],
        *,
        is_rank_zero: bool,
    ) -> None:
        """Write a checkpoint of the session as it is now; all ranks call this.

        Raises WriteError where there is no room for it, and RunError; nothing is left of it then.
        """
        if is_rank_zero:
            self.checkpoints.begin(position.step)
        try:
            self._write(session, position, rates, is_rank_zero=is_rank_zero)
        except BaseException:
            if is_rank_zero:
                self.checkpoints.drop(position.step)
            raise

    def _write(
        self,
        session: TrainingRunner,
        position: Position,
        rates: Mapping[str, Any],
        *,
        is_rank_zero: bool,
    ) -> None:
        path = self.checkpoints.unfinished(position.step)
        session.call_workers(MEET)
        arguments = {"directory": str(path.resolve()), "tensors": self._owned}
        answers = session.call_workers(SAVE, arguments)
        if is_rank_zero:
            written = as_written(list(answers.values()))
            written += write_pieces(path, len(answers), self._rest())
            write_index(path, written, self._program.aliases())
            write_rates(path, rates)
            write_manifest(path, position, tuple(self._program.model))
            self.checkpoints.finish(path)

    def load(self, session: TrainingRunner, path: Path) -> Resumed:
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


SAVE = "shardwright.training.checkpoint:save_slot"
MEET = "shardwright.training.checkpoint:meet"
LOAD = "shardwright.training.checkpoint:load_slot"


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
