"""What split stages have in a generated file beside what other stages have.

Comes in: the stages of one partition, a slot each. Goes out: the table of their slices, as their
class holds it, and the expressions that choose by slot what differs from slot to slot. What always
holds: the text is the same on all slots, so that slots that do the same are of one class.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.codegenerate.spelling.literals import quoted
from shardwright.codegenerate.splitting.collectives import is_collective
from shardwright.codegenerate.stage import Program, Stage
from shardwright.ir import WITH_BACKWARD
from shardwright.sharding.ranges import format_ranges

BASE = "SplitStage"
TYPE = "ClassVar[Slices]"
STAGE_PARAMETERS = ("group: dist.ProcessGroup | None = None", "slot: int | None = None")
MODULE_PARAMETERS = ("slots: Slots",)

_Entry = tuple[str, tuple[int, ...], tuple[str, ...]]


def is_split(stage: Stage) -> bool:
    """Whether a stage is one of several slots'."""
    return stage.mesh is not None


def support_names(program: Program) -> list[str]:
    """The names of `shardwright.codegenerate.support` that a program's file uses."""
    stages = [stage for partition in program.partitions for stage in partition]
    nodes = [node for stage in stages for node in stage.graph.nodes]
    own = ["with_backward"] if any(node.op == WITH_BACKWARD for node in nodes) else []
    if not any(map(is_split, stages)):
        return own
    found = {node.op for node in nodes if is_collective(node)}
    return [
        *own,
        *sorted(found),
        BASE,
        "Slots",
        "Slices",
        "slot_of",
        "share",
        "unfilled",
        "join_state_dicts",
    ]


def slots_expression(stage: Stage) -> str:
    """What a stage's constructor knows its place by."""
    assert stage.mesh is not None
    axes = zip(stage.mesh.axes, stage.mesh.sizes, strict=True)
    sizes = ", ".join(f"{quoted(axis)}: {size}" for axis, size in axes)
    return f"Slots({{{sizes}}}, group, slot)"


def slices_field(stage: Stage) -> str:
    """The table of slices as a field of a class."""
    return f"slices: {TYPE} = {_table_name(stage)}"


def _table_name(stage: Stage) -> str:
    return f"{stage.name.upper()}_SLICES"


def slices_table(stages: Sequence[Stage]) -> str:
    """The slices of a partition's slots; paths have ``*`` for numbers."""
    entries = {path: _entry(stages, path) for path in stages[0].slices}
    every = [name for value in stages[0].graph.stored() for name in value.names]
    patterns: dict[str, dict[str, _Entry | None]] = {}
    for path in every:
        patterns.setdefault(_pattern(path), {})[path] = entries.get(path)
    rows: dict[str, _Entry] = {}
    for pattern, found in patterns.items():
        given = [_patterned(path, entry) for path, entry in found.items() if entry is not None]
        if given and len(given) == len(found) and len(set(given)) == 1:
            rows[pattern] = given[0]
        else:
            rows |= {path: entry for path, entry in found.items() if entry is not None}
    texts = (
        f"{quoted(path)}: ({quoted(name)}, {shape}, {_tuple(ranges)})"
        for path, (name, shape, ranges) in rows.items()
    )
    inside = "".join(f"{text}, " for text in texts)
    return f"{_table_name(stages[0])}: Slices = {{{inside}}}"


def _tuple(texts: Sequence[str]) -> str:
    inside = ", ".join(map(quoted, texts))
    return f"({inside})" if texts[1:] else f"({inside},)"


def _entry(stages: Sequence[Stage], path: str) -> _Entry:
    name, _, shape = stages[0].slices[path]
    return name, shape, tuple(format_ranges(stage.slices[path][1]) for stage in stages)


def _patterned(path: str, entry: _Entry) -> _Entry:
    """An entry with ``*`` for the numbers in its name, where those are the path's."""
    same = _numbers(path) == _numbers(entry[0])
    return (_pattern(entry[0]), *entry[1:]) if same else entry


def _pattern(path: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def _numbers(path: str) -> list[str]:
    return [part for part in path.split(".") if part.isdigit()]


def by_slot(texts: Sequence[str]) -> str:
    """What differs from slot to slot, chosen by ``place``; the text itself where it does not."""
    if len(set(texts)) == 1:
        return texts[0]
    return f"({', '.join(texts)})[place]"
