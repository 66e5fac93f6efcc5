"""Calls with fewer rows than a pipeline was captured with: padded, run, and cut.

In comes a pipeline and a call whose inputs have fewer rows; out comes which dimension of each
output has their rows, if every operator maps row i to row i (`planning.row_dims`). Where one mixes
rows, or has no annotation, the call is refused, and the operator named. A lowered file says it
itself: it was followed when the file was lowered.

What always holds: rows that pad are copies of the last one, so that indices are valid and nothing
is infinite that was not; they change no other row, and nobody sees them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from shardwright.errors import InputError
from shardwright.pipeline import Pipeline
from shardwright.planning.row_dims import row_dims as followed


class ShortBatch(NamedTuple):
    """A call with fewer rows: how many, of how many, and which inputs have them, along dim 0."""

    rows: int
    size: int
    inputs: frozenset[str]

    def pad(self, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The call's tensors with copies of the last row up to the size."""
        missing = self.size - self.rows
        return {
            name: torch.cat([tensor, tensor[-1:].expand(missing, *tensor.shape[1:])])
            if name in self.inputs
            else tensor
            for name, tensor in whole.items()
        }

    def cut(self, outputs: Mapping[str, Tensor], dims: Mapping[str, int]) -> dict[str, Tensor]:
        """What the rows given make, of outputs by the original's names, along ``dims``."""
        found = dict(outputs)
        for name, dim in dims.items():
            size = outputs[name].shape[dim] // self.size * self.rows
            found[name] = outputs[name].narrow(dim, 0, size)
        return found


def short_batch(pipeline: Pipeline, whole: Mapping[str, Tensor]) -> ShortBatch | None:
    """What a call with other shapes lacks, where that is as many rows of some inputs."""
    expected = pipeline.metadata.tensors.inputs
    shapes = {name: (tuple(tensor.shape), expected[name].shape) for name, tensor in whole.items()}
    other = {name: pair for name, pair in shapes.items() if pair[0] != pair[1]}
    sizes = {(found[:1], size[:1]) for found, size in other.values() if found[1:] == size[1:]}
    if len(sizes) != 1 or any(found[1:] != size[1:] for found, size in other.values()):
        return None
    ((found, size),) = sizes
    if not found or not size or not 0 < found[0] < size[0]:
        return None
    return ShortBatch(found[0], size[0], frozenset(other))


def row_dims(pipeline: Pipeline, batch: ShortBatch) -> dict[str, int]:
    """Along which dimension each output has the rows of the inputs that a call cuts short.

    Raises InputError where something mixes the rows, or a lowered file does not say that nothing
    does.
    """
    dims = _row_dims(pipeline, batch)
    for name, dim in dims.items():
        found = pipeline.metadata.tensors.outputs[name].shape[dim]
        if found % batch.size:
            raise InputError(
                f"the file makes {found} rows of {name!r}, which is no multiple of {batch.size}"
            )
    return dims


def _row_dims(pipeline: Pipeline, batch: ShortBatch) -> dict[str, int]:
    said = pipeline.metadata.rows
    if not said or all(task.kind != "dfg" for task in pipeline.supertasks.values()):
        return followed(pipeline, batch.inputs, batch.size)
    for rows in said:
        if batch.inputs == {*rows.inputs}:
            return rows.outputs
    raise InputError(
        f"the inputs with fewer rows are {', '.join(sorted(batch.inputs))}, those whose rows are "
        f"independent {' or '.join(', '.join(rows.inputs) for rows in said)}"
    )
