"""Packages whose names are imported when they are first asked for, and what folders supply so.

A package says what it gives as any other does, but under ``if TYPE_CHECKING``, and then calls
`import_lazily`. So whoever imports one module of it, as a worker does, pays for no other one.

`SUPPLIED` lists what an earlier folder takes from a later one. It is a table of names, not of
objects that a module files when it is imported: then what a process can do would depend on what it
happens to have imported.

Invariant: a name is the object that it would be had it been imported at once, also where a
submodule is called the same; submodules are attributes without being imported before.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

SUPPLIED: dict[str, tuple[str, str]] = {
    "operators": ("shardwright.kernels.operators", "OPERATORS"),
}
"""What earlier folders take from later ones: the module that has it, and its name there."""

REMOVED = dict.fromkeys(
    ("exact_partition", "mixed_partition", "refine_partition"),
    "pipedream_partition or metis_partition",
)
"""Public names of earlier versions, and what to use instead."""


def supplied(what: str) -> Any:
    """What a later folder supplies, a key of `SUPPLIED`; its module is imported here."""
    module, name = SUPPLIED[what]
    return getattr(import_module(module), name)


class LazyPackage(ModuleType):
    """A package that imports its names when they are asked for."""

    _homes: dict[str, tuple[str, str]]
    """Of each name, the module that it comes from, and what it is called there."""

    def __getattr__(self, name: str) -> Any:
        if name in self._homes:
            module, original = self._homes[name]
            self.__dict__[name] = getattr(import_module(module), original)
            return self.__dict__[name]
        submodule = f"{self.__name__}.{name}"
        if not name.startswith("_") and find_spec(submodule):
            return import_module(submodule)
        hint = f"; it was removed, use {REMOVED[name]}" if name in REMOVED else ""
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}{hint}")

    def __setattr__(self, name: str, value: object) -> None:
        is_submodule = isinstance(value, ModuleType) and name in self._homes
        if not is_submodule:  # Else what has imported it would hide the name.
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._homes})


def import_lazily(package: str, kind: type[LazyPackage] = LazyPackage) -> None:
    """Let a package, which calls this, import when asked what it imports for type checkers."""
    module = sys.modules[package]
    module.__dict__["_homes"] = dict(_homes(ast.parse(inspect.getsource(module))))
    module.__class__ = kind


def _homes(tree: ast.Module) -> Iterator[tuple[str, tuple[str, str]]]:
    """The names that a package's source imports under ``if TYPE_CHECKING``."""
    for block in tree.body:
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING":
            for line in block.body:
                assert isinstance(line, ast.ImportFrom), "a package gives names of its modules"
                assert line.module is not None, "packages import by whole names"
                for alias in line.names:
                    yield alias.asname or alias.name, (line.module, alias.name)
