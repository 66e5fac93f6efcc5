"""Placements: what the slots along one axis of a mesh hold, in the words of PyTorch's DTensor.

Invariant: a placement prints as text that parses back to it: ``Replicate``, ``Shard(0)``,
``Shard(2 by 64)``, ``Partial(sum)``.
"""

from __future__ import annotations

import re

import msgspec

from shardwright.errors import PlanError

REDUCE_OPS = ("sum", "avg", "max", "min")
"""The reductions that the pipeline format knows."""


class Replicate(msgspec.Struct, frozen=True, tag=str.lower, forbid_unknown_fields=True):
    """Every slot along the axis holds the same."""

    def __str__(self) -> str:
        return "Replicate"


class Shard(msgspec.Struct, frozen=True, tag=str.lower, forbid_unknown_fields=True):
    """Each slot along the axis holds its part of dimension ``dim``, a multiple of ``unit``.

    10 heads of 64 have the unit 64: over 4 slots they are 192, 192, 128 and 128.
    """

    dim: int
    unit: int = 1

    def __post_init__(self) -> None:
        if self.dim < 0 or self.unit < 1:
            raise PlanError(
                f"Shard needs a dimension from 0 and a unit from 1 up, found {self.dim} and "
                f"{self.unit}"
            )

    def __str__(self) -> str:
        return f"Shard({self.dim})" if self.unit == 1 else f"Shard({self.dim} by {self.unit})"


class Partial(msgspec.Struct, frozen=True, tag=str.lower, forbid_unknown_fields=True):
    """Each slot along the axis holds a term; reduced by ``op`` they make the tensor."""

    op: str = "sum"

    def __post_init__(self) -> None:
        if self.op not in REDUCE_OPS:
            raise PlanError(f"Partial knows {', '.join(REDUCE_OPS)}, found {self.op!r}")

    def __str__(self) -> str:
        return f"Partial({self.op})"


Placement = Replicate | Shard | Partial
Placements = tuple[Placement, ...]
"""One placement a mesh axis, the outermost axis first."""

_PLACEMENT = re.compile(
    r"Replicate|Shard\((?P<dim>\d+)(?: by (?P<unit>\d+))?\)|Partial(?:\((?P<op>\w+)\))?"
)


def parse_placement(text: str) -> Placement:
    """The placement that prints as ``text``; ``Partial`` alone is a sum."""
    match = _PLACEMENT.fullmatch(text)
    if match is None:
        raise PlanError(
            f"{text!r} is no placement; there are Replicate, Shard(dim), Shard(dim by unit) and "
            f"Partial(op)"
        )
    if match["dim"] is not None:
        return Shard(int(match["dim"]), int(match["unit"] or 1))
    return Replicate() if text == "Replicate" else Partial(match["op"] or "sum")
