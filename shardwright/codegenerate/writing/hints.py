"""Names for the values of one forward: those of the program, where its text tells them.

Comes in: what a forward does, in order. Goes out: a wanted name for each value. What always holds:
names depend on the forward's own work only, never on who calls it, so that equal modules get equal
names.

A value is named after the variable that the program assigns it to, or reads it from, where the
numbers of values and of variables in the statement agree. Else after the argument of the module
that reads it, the module that makes it, or its operator.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from shardwright.codegenerate.writing import origins
from shardwright.codegenerate.writing.names import identifier, stem
from shardwright.ir import IRGraph
from shardwright.ir.values import Source

PLAIN = {"bool": "mask", "i64": "index", "i32": "index"}
"""Names by dtype for what nothing else names; of other dtypes ``x``."""


@dataclass(frozen=True, slots=True)
class Act:
    """One operator or call: what it reads and makes, and its line.

    takes, gives
        Names that it has for them, one each, or nothing.
    """

    reads: tuple[int, ...]
    makes: tuple[int, ...]
    source: Source | None = None
    takes: tuple[str, ...] = ()
    gives: tuple[str, ...] = ()


def wanted_names(
    graph: IRGraph, acts: Sequence[Act], arguments: Iterable[int], outward: Iterable[int]
) -> dict[int, str]:
    """A name for each value that ``acts`` make and each of ``arguments``; ``outward`` leave."""
    names: dict[int, str] = {}
    groups = [list(group) for _, group in groupby(enumerate(acts), key=_place)]
    last = {v: at for at, group in enumerate(groups) for _, act in group for v in act.reads}
    last |= dict.fromkeys(outward, len(groups))
    for at, group in enumerate(groups):
        left = [[v for v in act.makes if last.get(v, -1) > at] for _, act in group]
        _name_targets(group[0][1].source, left, names)
    for group in groups:
        _name_reads(graph, [act for _, act in group], names)
    for act in acts:
        _name_by_call(act, names)
    for act in acts:
        for value_id in act.makes:
            names.setdefault(value_id, stem(graph.values[value_id].name))
    for value_id in arguments:
        names.setdefault(value_id, PLAIN.get(graph.values[value_id].dtype, "x"))
    return names


def _place(numbered: tuple[int, Act]) -> object:
    """The statement of an act; acts without a line are each by themselves."""
    at, act = numbered
    return origins.place(act.source) if act.source is not None else at


def _name_targets(source: Source | None, made: list[list[int]], names: dict[int, str]) -> None:
    """Name what a statement makes and others read, a list an act, after its variables."""
    statement = origins.statement_at(source)
    if statement is None or statement.targets is None:
        return
    targets, left = statement.targets, [value_id for values in made for value_id in values]
    if len(targets) > len(left):
        targets = tuple(name for name in targets if name.strip("_"))
    if len(targets) == 1 and left:
        left = next(values for values in reversed(made) if values)
    if len(targets) == len(left):
        _take(zip(left, targets, strict=True), names)


def _name_reads(graph: IRGraph, acts: Sequence[Act], names: dict[int, str]) -> None:
    """Name what a statement reads after its variables."""
    statement = origins.statement_at(acts[0].source)
    if statement is None:
        return
    made = {v for act in acts for v in act.makes}
    read = dict.fromkeys(v for act in acts for v in act.reads if v not in made)
    values = [v for v in read if not graph.values[v].is_stored]
    variables = statement.reads[:1] if len(values) == 1 else statement.reads
    if len(variables) == len(values):
        _take(zip(values, variables, strict=True), names)


def _name_by_call(act: Act, names: dict[int, str]) -> None:
    for values, given in ((act.reads, act.takes), (act.makes, act.gives)):
        if given:
            _take(zip(values, given, strict=True), names)


def _take(pairs: Iterable[tuple[int, str]], names: dict[int, str]) -> None:
    for value_id, name in pairs:
        if name.strip("_"):
            names.setdefault(value_id, identifier(name))
