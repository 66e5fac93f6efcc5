"""Modules that stand beside one another under numbers or keys, as one expression.

Comes in: the keys of modules and what makes each. Goes out: what makes all of them,
``nn.ModuleDict({str(i): Block() for i in range(6, 12)})``. What always holds: keys and order are
those given.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from shardwright.codegenerate.spelling.literals import quoted
from shardwright.codegenerate.writing.loops import number_range

SHORTEST = 3
"""Equal modules in a row that are worth a comprehension."""

Item = tuple[str, str]
"""A key, and what makes its module."""


def module_dict(items: Sequence[Item]) -> str:
    """A ModuleDict of these modules."""
    runs = _runs(items)
    if len(runs) == 1 and (one := _comprehension(runs[0])):
        return f"nn.ModuleDict({{{one}}})"
    return f"nn.ModuleDict({{{', '.join(map(_part, runs))}}})"


def parameter_dict(items: Sequence[Item]) -> str:
    """A ParameterDict."""
    return f"nn.ParameterDict({{{', '.join(f'{quoted(key)}: {made}' for key, made in items)}}})"


def sequential(items: Sequence[Item]) -> str:
    """A Sequential, of which there may be only a part."""
    keys = [key for key, _ in items]
    makers = [maker for _, maker in items]
    equal = len(set(makers)) == 1 and len(items) >= SHORTEST
    if keys == [str(i) for i in range(len(keys))]:
        if equal:
            return f"nn.Sequential(*({makers[0]} for _ in range({len(items)})))"
        return f"nn.Sequential({', '.join(makers)})"
    if equal and (numbers := number_range(keys)) is not None:
        return f"nn.Sequential(OrderedDict((str(i), {makers[0]}) for i in {numbers}))"
    pairs = ", ".join(f"{quoted(key)}: {maker}" for key, maker in items)
    return f"nn.Sequential(OrderedDict({{{pairs}}}))"


def _runs(items: Sequence[Item]) -> list[list[Item]]:
    """Items split where what makes them changes, or their numbers do not follow."""
    numbered = enumerate(items)
    groups = groupby(numbered, key=lambda at: (at[1][1], _offset(at[1][0], at[0])))
    return [[item for _, item in group] for _, group in groups]


def _offset(key: str, place: int) -> int | str:
    return int(key) - place if key.isascii() and key.isdigit() else key


def _comprehension(run: Sequence[Item]) -> str | None:
    numbers = number_range([key for key, _ in run])
    if len(run) < SHORTEST or numbers is None:
        return None
    return f"str(i): {run[0][1]} for i in {numbers}"


def _part(run: Sequence[Item]) -> str:
    if one := _comprehension(run):
        return f"**{{{one}}}"
    return ", ".join(f"{quoted(key)}: {maker}" for key, maker in run)
