"""Writing a session's state to checkpoints, and reading it from one.

Every worker writes what it owns (`shards`), the driver (rank 0 under torchrun) the rest: the index,
what of the program's state_dict no worker has, and where the run stands. A checkpoint is read by
each worker for itself, whatever mesh it was written on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from shardwright.pipeline.schema import Document
from shardwright.runtime.session import Session
from shardwright.training.checkpoint import (
    Checkpoints,
    Position,
    read_manifest,
    read_rates,
    write_manifest,
    write_rates,
)
from shardwright.training.dcp import Piece, read_pieces, write_index, write_pieces
from shardwright.training.program import Program
from shardwright.training.shards import LOAD, MEET, SAVE, as_written, owned


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where a checkpoint says that a run stood, and its learning rates."""

    position: Position
    rates: Mapping[str, Any]


class Saver:
    """Keeps the checkpoints of one run of a program in a directory.

    Raises RunError where a pipeline's state cannot be written.
    """

    def __init__(self, directory: str | Path, program: Program, pipeline: Document) -> None:
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

    def _rest(self) -> dict[Piece, Tensor]:
        """What of the program's state_dict no worker has."""
        return {Piece.whole(name, tensor): tensor for name, tensor in self._program.rest.items()}
