"""The text of `shardwright.codegenerate.support`, as far as a generated file needs it.

Comes in: names that a file uses. Goes out: import lines, and the definitions of these names and of
what they use in turn, as they stand in the package, in its order.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import NamedTuple

PACKAGE = "shardwright.codegenerate.support"
MODULES = ("functions", "slots", "exchanges", "slices")
"""In the order in which their definitions are pasted; each uses those before it."""


class Pasted(NamedTuple):
    """Import lines, each of one name, and definitions, two empty lines between them."""

    imports: tuple[str, ...]
    text: str


class _Definition(NamedTuple):
    """A class, function or alias of the package, the names it uses, and how they are imported."""

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
            uses = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
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
