"""Identifiers that a person would choose, for classes and for the values of one forward.

No name is a keyword, hides a builtin or an import of the file, or stands for two things at once.
Names of values depend on the forward's own work only, never on who calls it, so that equal modules
get equal names: a value is named after the variable that the program assigns it to, or reads it
from, where the numbers of values and of variables in the statement agree; else after the argument
of the module that reads it, the module that makes it, or its operator.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from keyword import iskeyword, issoftkeyword
from unicodedata import normalize

from shardwright.codegenerate.writing import origins
from shardwright.ir import IRGraph
from shardwright.ir.values import Source

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


class ClassNames:
    """Hands out names of classes, the second of a name with a 2."""

    def __init__(self, taken: Iterable[str]) -> None:
        self._taken = {*taken, *RESERVED}

    def take(self, wanted: str) -> str:
        """``wanted``, or the first free ``wanted2``, ``wanted3``, …."""
        name, number = wanted, 2
        separator = "_" if wanted[-1].isdigit() else ""
        while name in self._taken:
            name, number = f"{wanted}{separator}{number}", number + 1
        self._taken.add(name)
        return name


class Variables:
    """The variables of one function, and which are in use."""

    def __init__(self, reserved: Iterable[str] = ()) -> None:
        self._held = set(reserved)

    def take(self, wanted: str) -> str:
        """``wanted``, or the first ``wanted_1``, ``wanted_2``, … that nothing uses now."""
        name, number = wanted, 1
        while name in self._held:
            name, number = f"{wanted}_{number}", number + 1
        self._held.add(name)
        return name

    def free(self, name: str) -> None:
        """Say that nothing needs what ``name`` holds."""
        self._held.discard(name)


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
    return origins.place(step.source) if step.source is not None else at


def _name_targets(source: Source | None, made: list[list[int]], names: dict[int, str]) -> None:
    """Name what a statement makes and others read, a list a step, after its variables."""
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


def _name_reads(graph: IRGraph, steps: Sequence[NamedStep], names: dict[int, str]) -> None:
    """Name what a statement reads after its variables."""
    statement = origins.statement_at(steps[0].source)
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
