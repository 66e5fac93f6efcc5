"""Which pairs of a name and an option ``make test`` tries, and which only ``make test-all``.

Comes in: names, as of models, and options, in their order. Goes out: all pairs, as parameters of a
test. Each name has its turn with some of the options; the pairs that are out of turn are
``exhaustive``. So every name is tried, and every option with names from all over the table.
"""

from collections.abc import Hashable, Sequence
from typing import TypeVar

import pytest

Option = TypeVar("Option", bound=Hashable)


def in_turn(
    names: Sequence[str], options: Sequence[Option], turns: int = 1
) -> set[tuple[str, Option]]:
    """Name k with option k, counted round, and with those that follow it in equal steps."""
    step, rest = divmod(len(options), turns)
    assert rest == 0, f"{len(options)} options do not divide into {turns}"
    return {
        (name, option)
        for row, name in enumerate(names)
        for place, option in enumerate(options)
        if (place - row) % step == 0
    }


def rotated(names: Sequence[str], options: Sequence[Option], turns: int = 1) -> list[object]:
    """All pairs; ``(name, option)`` is what a test takes."""
    tried = in_turn(names, options, turns)
    return [
        pytest.param(
            name,
            option,
            id=f"{name}-{option_id(option)}",
            marks=() if (name, option) in tried else pytest.mark.exhaustive,
        )
        for name in names
        for option in options
    ]


def sampled(names: Sequence[str], step: int) -> list[object]:
    """All names, of which each ``step``-th is tried."""
    marks = [() if number % step == 0 else pytest.mark.exhaustive for number in range(len(names))]
    return [pytest.param(name, marks=mark) for name, mark in zip(names, marks, strict=True)]


def option_id(option: object) -> str:
    """An option as it stands in the name of a test."""
    return "-".join(map(str, option)) if isinstance(option, tuple) else str(option)
