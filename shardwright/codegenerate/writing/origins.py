"""What the program's own text says about its calls: the statement, and its variables' names.

Nothing here is needed to write correct code: without the files there are fewer comments and plainer
names.
"""

from __future__ import annotations

import ast
import linecache
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import PurePath

from shardwright.ir.values import Source

WIDTH = 100
_PRAGMA = re.compile(r"#|noqa|type:|fmt:|isort:|ruff:|pragma:")


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement of the program.

    line
        Where it begins.
    text
        On one line.
    targets
        The variables that it assigns, None where it assigns something else.
    reads
        The function's variables that it reads, in the order of their places.
    """

    line: int
    text: str
    targets: tuple[str, ...] | None = None
    reads: tuple[str, ...] = ()


def statement_at(source: Source | None) -> Statement | None:
    """The statement that covers a line, None where the file cannot be read or has none there."""
    return _statements(source.file).get(source.line) if source is not None else None


def place(source: Source) -> tuple[str, int]:
    """File and line where the statement begins that a line belongs to."""
    statement = statement_at(source)
    return source.file, statement.line if statement else source.line


def comment(source: Source, indent: int) -> str:
    """``# model.py:12  x = self.norm(x)``, cut to the width."""
    file, line = place(source)
    statement = statement_at(source)
    text = statement.text if statement else linecache.getline(file, line).strip()
    name = re.sub(r"[^\x20-\x7e]", "?", PurePath(file.replace("\\", "/")).name)
    head = f"# {name}:{line}"
    if not text or not text.isascii() or not text.isprintable() or _PRAGMA.search(text):
        return head[: WIDTH - indent]
    whole = f"{head}  {text}"
    return whole if indent + len(whole) <= WIDTH else f"{whole[: WIDTH - indent - 3].rstrip()}..."


def read_again() -> None:
    """Forget files that were read: they may have changed since."""
    linecache.checkcache()
    for known in (_statements, _tree, _calls):
        known.cache_clear()


@cache
def _statements(file: str) -> dict[int, Statement]:
    """The simple statements of a file's functions by each line that they cover."""
    found: dict[int, Statement] = {}
    for node in ast.walk(_tree(file)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            variables = _variables(node)
            for statement in _simple(node.body):
                described = _describe(statement, variables)
                for line in range(statement.lineno, (statement.end_lineno or 0) + 1):
                    found.setdefault(line, described)
    return found


@cache
def _tree(file: str) -> ast.Module:
    """A file's syntax tree; an empty one where it cannot be read or is not Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the program's text, not of ours
            return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def _simple(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements in a body, and in what it nests, that nest none."""
    for statement in body:
        nested = [
            part
            for name in ("body", "orelse", "finalbody", "handlers", "cases")
            for part in getattr(statement, name, [])
        ]
        if not nested:
            yield statement
        for part in nested:
            yield from _simple([part] if isinstance(part, ast.stmt) else part.body)


def _variables(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """The function's arguments and what it assigns."""
    given = function.args
    arguments = {a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
    stored = {
        node.id
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    return (arguments | stored) - {"self", "cls"}


def _describe(statement: ast.stmt, variables: set[str]) -> Statement:
    called = {
        node.func.id
        for node in ast.walk(statement)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    names = [
        node
        for node in ast.walk(statement)
        if isinstance(node, ast.Name)
        and (isinstance(node.ctx, ast.Load) or isinstance(statement, ast.AugAssign))
        and node.id in variables - called
    ]
    names.sort(key=lambda name: (name.lineno, name.col_offset))
    return Statement(
        statement.lineno,
        ast.unparse(statement).split("\n")[0],
        _targets(statement),
        tuple(dict.fromkeys(name.id for name in names)),
    )


def _targets(statement: ast.stmt) -> tuple[str, ...] | None:
    """The plain variables that an assignment gives values."""
    match statement:
        case ast.Assign(targets=[target]) | ast.AugAssign(target=target):
            parts = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
        case ast.AnnAssign(target=target, value=ast.expr()):
            parts = [target]
        case _:
            return None
    if not all(isinstance(part, ast.Name) for part in parts):
        return None
    return tuple(part.id for part in parts if isinstance(part, ast.Name))


# --- calls of modules -----------------------------------------------------------------------------


def call_site(qualified: str, name: str) -> Source | None:
    """Where a class calls its module ``name``, ``self.name(x)``; None unless that is one place.

    The class is looked for among modules that are loaded; nothing is imported.
    """
    for cls in getattr(_loaded(qualified), "__mro__", ()):
        module = sys.modules.get(cls.__module__)
        file = getattr(module, "__file__", None)
        if file is None or cls.__module__.partition(".")[0] in ("builtins", "torch"):
            continue
        lines = _calls(file).get((cls.__qualname__.rpartition(".")[2], name), ())
        if lines:
            return Source(file, lines[0]) if len(lines) == 1 else None
    return None


def _loaded(qualified: str) -> type | None:
    """The class of a qualified name, if its module is loaded."""
    parts = qualified.split(".")
    for count in range(len(parts) - 1, 0, -1):
        found: object = sys.modules.get(".".join(parts[:count]))
        for part in parts[count:] if found is not None else ():
            found = getattr(found, part, None)
        if isinstance(found, type):
            return found
    return None


@cache
def _calls(file: str) -> dict[tuple[str, str], tuple[int, ...]]:
    """The lines of the statements in which a class calls a module, by class and module."""
    found: dict[tuple[str, str], tuple[int, ...]] = {}
    for cls in (node for node in ast.walk(_tree(file)) if isinstance(node, ast.ClassDef)):
        for statement in _simple(cls.body):
            for node in ast.walk(statement):
                if (name := _called_module(node)) is not None:
                    lines = found.get((cls.name, name), ())
                    found[cls.name, name] = tuple(dict.fromkeys((*lines, statement.lineno)))
    return found


def _called_module(node: ast.AST) -> str | None:
    """``name`` of a call ``self.name(…)``."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=name)):
            return name
    return None
