"""The shapes that generated stages compute with, held against the tensors of a call.

Comes in: stages, how a batch is cut, and a call's tensors before they are. Goes out: an InputError
that says which sizes would do, or nothing. What always holds: a tensor that passes has, in each
microbatch, the shape that every stage that takes it was captured with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from shardwright.codegenerate.microbatching import Cutting
from shardwright.codegenerate.stages import PipelineStage, Shape
from shardwright.errors import InputError


def captured_shapes(stages: Iterable[PipelineStage]) -> dict[str, Shape]:
    """The shape of each of the model's inputs in a microbatch, of which a stage says it."""
    return {
        name: shape
        for stage in stages
        for name, source, shape in zip(stage.inputs, stage.sources, stage.shapes, strict=True)
        if source is None and shape is not None
    }


def check_shapes(
    stages: Iterable[PipelineStage], cutting: Cutting, given: Mapping[str, Tensor]
) -> None:
    """Raise InputError where microbatches would not have the shapes that stages compute with."""
    for stage in stages:
        for name, shape in captured_shapes([stage]).items():
            found = tuple(given[name].shape)
            if found not in cutting.fitting(name, shape):
                raise InputError(
                    f"the input {name!r} is {list(found)}, but stage {stage.index} was captured "
                    f"with {list(shape)}, and computes with that alone; "
                    f"{_remedy(name, shape, found, cutting)}"
                )


def _remedy(name: str, shape: Shape, found: Shape, cutting: Cutting) -> str:
    """What to do where an input has another shape: which sizes divide, if that is all."""
    dim, count, batched = cutting.dim, cutting.count, cutting.batched
    if batched is not None and found in (shape, cutting.whole(shape)):
        return f"leave {name!r} out of batched=" if name in batched else "name it in batched="
    given_whole = batched is not None and name not in batched
    others = (found[:dim], found[dim + 1 :])
    if given_whole or len(shape) <= dim or others != (shape[:dim], shape[dim + 1 :]):
        return "pad or cut it, or capture the model with this shape"
    rows, size = found[dim], shape[dim]
    divides = size > 0 and rows > 0 and rows % size == 0
    fitting = f", or {_microbatches(rows // size)}" if divides else ""
    return (
        f"give {count * size} rows in {_microbatches(count)}{fitting}, or capture the model with "
        "the shapes of a microbatch"
    )


def _microbatches(count: int) -> str:
    return f"{count} microbatch{'' if count == 1 else 'es'}"
