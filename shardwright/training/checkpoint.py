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
import os
import pickle
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from shardwright.atomic import read_whole, replacing
from shardwright.errors import RunError, WeightError, WriteError
from shardwright.pipeline.archive import check_stored
from shardwright.training.dcp import is_complete

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
