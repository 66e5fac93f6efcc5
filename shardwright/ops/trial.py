"""Hold an annotation against the operator itself: split inputs, run, put together, compare.

In come a function of tensors, a `Dimop` and inputs; out comes what the parts give together, or a
`Mismatch`: the counterexample. The parts of a term (see `Dimop.terms`) are the value and zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch

from shardwright.ops.cuts import even_cuts
from shardwright.ops.dimop import Dimop, Slice
from shardwright.ops.lengths import Inference

Run = Callable[[list[torch.Tensor], Mapping[str, Any]], list[torch.Tensor]]
"""The operator: tensors in the order of the annotation's, keyword arguments; a list of outputs."""

TOLERANCE = {torch.float64: 1e-9, torch.complex128: 1e-9}
"""Relative to the largest element; other floating-point types get `COARSE`, the rest 0."""
COARSE = 1e-3


@dataclass(frozen=True, slots=True)
class Mismatch:
    """What a split gives that the whole does not."""

    identifier: str
    num: int
    reason: str


def split_mismatch(
    run: Run,
    dimop: Dimop,
    inference: Inference,
    inputs: Sequence[torch.Tensor],
    kwargs: Mapping[str, Any],
    identifier: str,
    num: int,
) -> Mismatch | None:
    """How the outputs of ``num`` parts differ from those of the whole; None where they do not."""
    whole = run(list(inputs), kwargs)
    parts = [
        dimop.part(inference, {identifier: cut}, kwargs)
        for cut in even_cuts(inference.lengths[identifier], num)
    ]
    try:
        made = [run(_inputs_of(inputs, part.inputs), part.kwargs) for part in parts]
    except Exception as error:  # whatever a user's function raises on slices
        return Mismatch(identifier, num, f"a part does not run: {type(error).__name__}: {error}")
    for index, expected in enumerate(whole):
        pieces = [
            (part.outputs[index], item[index]) for part, item in zip(parts, made, strict=True)
        ]
        reason = _difference(index, pieces, expected)
        if reason is not None:
            return Mismatch(identifier, num, reason)
    return None


def take(tensor: torch.Tensor, where: Slice) -> torch.Tensor:
    """A part's slice of a tensor; of a term, zeros in all parts but the first."""
    for dim, (start, end) in enumerate(where.ranges):
        tensor = tensor.narrow(dim, start, end - start)
    late = where.partial is not None and where.partial[0] > 0
    return torch.zeros_like(tensor) if late else tensor.clone()


def _inputs_of(
    inputs: Sequence[torch.Tensor], slices: Sequence[Slice | None]
) -> list[torch.Tensor]:
    tensors = [where for where in slices if where is not None]
    return [take(tensor, where) for tensor, where in zip(inputs, tensors, strict=True)]


def _difference(
    index: int, pieces: Sequence[tuple[Slice | None, torch.Tensor]], expected: torch.Tensor
) -> str | None:
    """How pieces of an output, put together, differ from the whole."""
    for number, (where, piece) in enumerate(pieces):
        if where is not None and tuple(piece.shape) != where.shape:
            return (
                f"output {index} of part {number} has shape {tuple(piece.shape)}; expected "
                f"{where.shape}"
            )
    slices = [where for where, _ in pieces if where is not None]
    tensors = [piece for _, piece in pieces]
    if slices and slices[0].partial is not None:
        joined = reduce(torch.add, tensors)
    else:
        joined = torch.zeros_like(expected)
        for where, piece in zip(slices, tensors, strict=True):
            joined[tuple(slice(*range_) for range_ in where.ranges)] = piece
    if same(joined, expected):
        return None
    place = _first_difference(joined, expected)
    return (
        f"output {index} at {place} is {expected[place].item():.6g} of the whole, but "
        f"{joined[place].item():.6g} put together"
    )


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal, up to rounding."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    if one.numel() == 0:
        return True
    tolerance = TOLERANCE.get(one.dtype, COARSE)
    finite = torch.isfinite(other)
    if not torch.equal(torch.isfinite(one), finite):
        return False
    if not torch.equal(one[~finite].nan_to_num(0, 1, -1), other[~finite].nan_to_num(0, 1, -1)):
        return False
    scale = other[finite].abs().max().item() if bool(finite.any()) else 0.0
    return bool(((one - other)[finite].abs() <= tolerance * scale).all())


def _first_difference(one: torch.Tensor, other: torch.Tensor) -> tuple[int, ...]:
    """Where two tensors of one shape differ most."""
    distance = (one.to(torch.complex128) - other.to(torch.complex128)).abs().nan_to_num(torch.inf)
    flat = int(distance.argmax()) if distance.numel() else 0
    place = []
    for size in reversed(distance.shape):
        flat, index = divmod(flat, size)
        place.append(index)
    return tuple(reversed(place))
