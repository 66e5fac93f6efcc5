"""What split stages have in a file beside what others have: tables of slices, and pasted support.

The text is the same on all slots, so that slots that do the same are of one class. Support is the
package `shardwright.codegenerate.support`, as far as a file needs it: the definitions that it names
and what these use in turn, as they stand in the package.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from shardwright.codegenerate.spelling.forms import quoted
from shardwright.codegenerate.splitting.collectives import is_collective
from shardwright.codegenerate.stages import Stage, StageProgram
from shardwright.ir import WITH_BACKWARD
from shardwright.sharding.ranges import format_ranges

PACKAGE = "shardwright.codegenerate.support"
MODULES = ("configuration", "exchanges", "slices")
"""In the order in which their definitions are pasted; each uses those before it."""


class Pasted(NamedTuple):
    """Import lines, each of one name, and definitions, two empty lines between them."""

    imports: tuple[str, ...]
    text: str


class _Definition(NamedTuple):
    """A class, function or alias of the package, the names it uses, and how they are imported.

    Names of its own variables are none that it uses.
    """

    text: str
    uses: frozenset[str]
    imports: Mapping[str, str]


def pasted(names: Collection[str]) -> Pasted:
    """What a file needs in order to use these names of the package."""
    known = definitions()
    needed: set[str] = set()
    _collect(names, needed)
    chosen = [definition for name, definition in known.items() if name in needed]
    imports = {
        line
        for definition in chosen
        for name, line in definition.imports.items()
        if name in definition.uses
    }
    return Pasted(tuple(sorted(imports)), "\n\n\n".join(one.text for one in chosen))


def _collect(names: Iterable[str], needed: set[str]) -> None:
    """Add names of the package, and what they use of it."""
    for name in names:
        if name in definitions() and name not in needed:
            needed.add(name)
            _collect(definitions()[name].uses, needed)


@cache
def definitions() -> Mapping[str, _Definition]:
    """Everything that the package defines, by name."""
    found: dict[str, _Definition] = {}
    for module in MODULES:
        source = files(PACKAGE).joinpath(f"{module}.py").read_text("utf-8")
        found |= _definitions(source)
    return found


@cache
def taken_names() -> frozenset[str]:
    """The names that the package defines or imports: no class of a file may have them."""
    found = definitions()
    return frozenset(found).union(*(definition.imports for definition in found.values()))


def _definitions(source: str) -> Iterator[tuple[str, _Definition]]:
    tree = ast.parse(source)
    imports = dict(line for node in tree.body for line in _imported(node))
    for node in tree.body:
        if (name := _defined(node)) is not None:
            names = [part for part in ast.walk(node) if isinstance(part, ast.Name)]
            stored = {name.id for name in names if isinstance(name.ctx, ast.Store)}
            uses = {name.id for name in names} - stored
            yield name, _Definition(_text(source, node), frozenset(uses), imports)


def _imported(node: ast.stmt) -> Iterator[tuple[str, str]]:
    """The names that a statement imports from elsewhere, each with an import line of its own."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            renamed = f" as {alias.asname}" if alias.asname else ""
            yield alias.asname or alias.name, f"import {alias.name}{renamed}"
    if isinstance(node, ast.ImportFrom) and node.module not in (None, "__future__"):
        for alias in node.names:
            if not str(node.module).startswith(PACKAGE):
                yield alias.name, f"from {node.module} import {alias.name}"


def _defined(node: ast.stmt) -> str | None:
    """The name that a statement defines."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return node.name
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return None


def _text(source: str, node: ast.stmt) -> str:
    """A definition as it is written, decorators included."""
    first = min([node.lineno, *(item.lineno for item in getattr(node, "decorator_list", []))])
    return "\n".join(source.splitlines()[first - 1 : node.end_lineno])


BASE = "SplitStage"
TYPE = "ClassVar[Slices]"
STAGE_PARAMETERS = ("group: dist.ProcessGroup | None = None", "slot: int | None = None")
MODULE_PARAMETERS = ("slots: Slots",)

_Entry = tuple[str, tuple[int, ...], tuple[str, ...]]


def is_split(stage: Stage) -> bool:
    """Whether a stage is one of several slots'."""
    return stage.mesh is not None


def support_names(program: StageProgram) -> list[str]:
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
