"""Partitions that one parameter ties.

Comes in: the stages of all partitions. What always holds behind the check: a parameter that stands
in two partitions stands in both as the same slice on each slot, so that each slot has one Parameter
for it, which both train.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardwright.codegenerate.stage import Stage
from shardwright.errors import CodegenError
from shardwright.sharding.ranges import Ranges, format_ranges, whole


def check_ties(partitions: Sequence[Sequence[Stage]]) -> None:
    """Raise CodegenError where partitions would have Parameters of their own for one parameter."""
    known: dict[str, dict[tuple[Ranges, ...], str]] = {}
    for slots in partitions:
        for name, held in _parameters(slots):
            others = known.setdefault(name, {})
            for ranges, other in others.items():
                if other != slots[0].name and ranges != held and _overlap(ranges, held):
                    raise CodegenError(
                        f"{other} and {slots[0].name} are tied by the parameter {name!r}, of which "
                        f"their slots hold {_spans(ranges)} and {_spans(held)}: these would be "
                        "trained apart; let the plan give both the same mesh, or one stage"
                    )
            others.setdefault(held, slots[0].name)


def _parameters(slots: Sequence[Stage]) -> Iterator[tuple[str, tuple[Ranges, ...]]]:
    """The parameters of a partition: the model's name, and what each slot has of it."""
    for value in slots[0].graph.stored():
        path = value.names[0]
        if value.role == "param" and path in slots[0].slices:
            yield slots[0].slices[path][0], tuple(stage.slices[path][1] for stage in slots)
        elif value.role == "param":
            yield path, (whole(value.shape),) * len(slots)


def _overlap(some: Sequence[Ranges], others: Sequence[Ranges]) -> bool:
    """Whether any of these slices have elements in common."""
    return any(
        all(max(start, first) < min(end, last) for (start, end), (first, last) in pairs)
        for one in some
        for other in others
        for pairs in [list(zip(one, other, strict=True))]
    )


def _spans(slots: Sequence[Ranges]) -> str:
    return " ".join(map(format_ranges, slots))
