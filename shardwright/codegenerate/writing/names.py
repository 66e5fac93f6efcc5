"""Names in generated code, and what the program's own text says about them.

A variable has the name that the program's statement gives it, a class the model's. The text of the
program is not needed to write correct code: without its files there are fewer comments and plainer
names.
"""

from __future__ import annotations

import ast
import builtins
import itertools
import linecache
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from keyword import iskeyword, issoftkeyword
from pathlib import PurePath
from unicodedata import normalize

from shardwright.ir import IRGraph
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


def statement_start(source: Source) -> tuple[str, int]:
    """File and line where the statement begins that a line belongs to."""
    statement = statement_at(source)
    return source.file, statement.line if statement else source.line


def source_comment(source: Source, indent: int) -> str:
    """``# model.py:12  x = self.norm(x)``, cut to the width."""
    file, line = statement_start(source)
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


# --- identifiers ----------------------------------------------------------------------------------


IMPORTED = (
    "F",
    "Tensor",
    "OrderedDict",
    "Any",
    "base64",
    "cast",
    "dist",
    "math",
    "nn",
    "torch",
    "warnings",
    "zlib",
)
"""What the names of a generated file's imports are."""
AMBIGUOUS = ("I", "O", "l")
"""Names that look like numbers."""
PASTED = "with_backward"
"""The function of a file that forwards call by its name; collectives have no names like values."""
RESERVED = frozenset((*IMPORTED, *AMBIGUOUS, PASTED, "self", *dir(builtins)))

STEMS = {
    "scaled_dot_product_attention": "attention",
    "native_layer_norm": "normed",
    "layer_norm": "normed",
    "_native_batch_norm_legit_functional": "normed",
    "batch_norm": "normed",
    "view": "x",
    "reshape": "x",
    "transpose": "x",
    "permute": "x",
    "contiguous": "x",
    "to": "x",
    "clone": "x",
    "detach": "x",
    "with_backward": "x",
    "input": "x",
    "arg0": "x",
}
"""Better names for what some operators make."""


def is_plain(name: str) -> bool:
    """Whether ``name`` can stand behind a dot in a class, and means itself there."""
    is_private = name.startswith("__") and not name.endswith("__")
    return name.isidentifier() and not (
        iskeyword(name) or is_private or normalize("NFKC", name) != name
    )


def identifier(text: str) -> str:
    """The nearest name that a variable may have."""
    name = re.sub(r"[^A-Za-z0-9_]+", "_", text).strip("_") or "x"
    name = f"x_{name}" if name[0].isdigit() else name
    return f"{name}_" if name in RESERVED or iskeyword(name) or issoftkeyword(name) else name


def stem(name: str) -> str:
    """A value's name without its module and without the number that made it unique."""
    bare = re.sub(r"(__?\d+)+$", "", name.rpartition("/")[2].rpartition(".")[2])
    return identifier(STEMS.get(bare, bare))


def class_stem(qualified: str, path: str) -> str:
    """The name for a class: its own, or one made from the module's path where it is not known."""
    bare = qualified.rpartition(".")[2]
    if not is_plain(bare):
        words = re.findall(r"[A-Za-z0-9]+", _without_numbers(path)) or ["module"]
        words += ["item"] if path.rpartition(".")[2].isdigit() else []
        bare = "".join(word[0].upper() + word[1:] for word in words)
    return f"{bare}_" if bare in RESERVED else bare


def _without_numbers(path: str) -> str:
    parts = [part for part in path.split(".") if not part.isdigit()]
    return parts[-1] if parts else ""


def item_name(class_name: str) -> str:
    """What one of several modules of a class is called in a loop: ``block`` for ``GPT2Block``."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z]*|[a-z]+", class_name)
    return identifier(words[-1].lower() if words else "module")


def unused(wanted: str, taken: set[str], separator: str = "_", first: int = 1) -> str:
    """``wanted``, or the first ``wanted_1``, ``wanted_2``, … that is not taken; it is then."""
    numbered = (f"{wanted}{separator}{number}" for number in itertools.count(first))
    name = next(name for name in itertools.chain([wanted], numbered) if name not in taken)
    taken.add(name)
    return name


def unused_class(wanted: str, taken: set[str]) -> str:
    """``Block``, the second of that name ``Block2``."""
    return unused(wanted, taken, "_" if wanted[-1].isdigit() else "", 2)


PLAIN = {"bool": "mask", "i64": "index", "i32": "index"}
"""Names by dtype for what nothing else names; of other dtypes ``x``."""


@dataclass(frozen=True, slots=True)
class NamedStep:
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
    graph: IRGraph, steps: Sequence[NamedStep], arguments: Iterable[int], outward: Iterable[int]
) -> dict[int, str]:
    """A name for each value that ``steps`` make and each of ``arguments``; ``outward`` leave."""
    names: dict[int, str] = {}
    groups = [list(group) for _, group in groupby(enumerate(steps), key=_place)]
    last = {v: at for at, group in enumerate(groups) for _, step in group for v in step.reads}
    last |= dict.fromkeys(outward, len(groups))
    for at, group in enumerate(groups):
        left = [[v for v in step.makes if last.get(v, -1) > at] for _, step in group]
        _name_targets(group[0][1].source, left, names)
    for group in groups:
        _name_reads(graph, [step for _, step in group], names)
    for step in steps:
        _name_by_call(step, names)
    for step in steps:
        for value_id in step.makes:
            names.setdefault(value_id, stem(graph.values[value_id].name))
    for value_id in arguments:
        names.setdefault(value_id, PLAIN.get(graph.values[value_id].dtype, "x"))
    return names


def _place(numbered: tuple[int, NamedStep]) -> object:
    """The statement of a step; steps without a line are each by themselves."""
    at, step = numbered
    return statement_start(step.source) if step.source is not None else at


def _name_targets(source: Source | None, made: list[list[int]], names: dict[int, str]) -> None:
    """Name what a statement makes and others read, a list a step, after its variables."""
    statement = statement_at(source)
    if statement is None or statement.targets is None:
        return
    targets, left = statement.targets, [value_id for values in made for value_id in values]
    if len(targets) > len(left):
        targets = tuple(name for name in targets if name.strip("_"))
    if len(targets) == 1 and left:
        left = next(values for values in reversed(made) if values)
    if len(targets) == len(left):
        _take(zip(left, targets, strict=True), names)


def _name_reads(graph: IRGraph, steps: Sequence[NamedStep], names: dict[int, str]) -> None:
    """Name what a statement reads after its variables."""
    statement = statement_at(steps[0].source)
    if statement is None:
        return
    made = {v for step in steps for v in step.makes}
    read = dict.fromkeys(v for step in steps for v in step.reads if v not in made)
    values = [v for v in read if not graph.values[v].is_stored]
    variables = statement.reads[:1] if len(values) == 1 else statement.reads
    if len(variables) == len(values):
        _take(zip(values, variables, strict=True), names)


def _name_by_call(step: NamedStep, names: dict[int, str]) -> None:
    for values, given in ((step.reads, step.takes), (step.makes, step.gives)):
        if given:
            _take(zip(values, given, strict=True), names)


def _take(pairs: Iterable[tuple[int, str]], names: dict[int, str]) -> None:
    for value_id, name in pairs:
        if name.strip("_"):
            names.setdefault(value_id, identifier(name))
