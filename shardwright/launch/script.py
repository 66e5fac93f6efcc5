"""The script that runs, read once more by a worker: as far as it takes to have its operators.

A worker reads it as ``__mp_main__``, as `multiprocessing` does, so what stands under a main guard
is not run; and a statement at a time, until the operators that are wanted are there, so what comes
after them is not either: a script without a guard, which runs a pipeline at its end, need not have
one. Where a statement that registers operators starts workers as well, reading ends there.
"""

from __future__ import annotations
import __future__

import ast
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import msgspec

from shardwright.errors import RunError

_NAME = "__mp_main__"


class Script(msgspec.Struct, frozen=True):
    """A script as it was started: its path, the package it belongs to, and ``sys.argv``."""

    path: str
    package: str
    arguments: tuple[str, ...]


class _Reading:
    """A script, the part of it that is to be read, and the module that it makes."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.is_under_way = False
        tree = ast.parse(Path(script.path).read_bytes(), script.path)
        self._statements = deque(tree.body)
        self._flags = _flags_of(tree)
        self._module = ModuleType(_NAME, ast.get_docstring(tree))
        self._module.__file__ = script.path
        self._module.__package__ = script.package
        sys.modules["__main__"] = sys.modules[_NAME] = self._module
        sys.argv[:] = script.arguments

    def read(self, until: Callable[[], bool]) -> None:
        self.is_under_way = True
        try:
            while self._statements and not until():
                one = ast.Module([self._statements.popleft()], [])
                code = compile(one, self.script.path, "exec", self._flags, dont_inherit=True)
                exec(code, self._module.__dict__)
        except (_Far, SystemExit):
            self._statements.clear()
        finally:
            self.is_under_way = False


def _flags_of(tree: ast.Module) -> int:
    """What ``from __future__ import ...`` at a script's head asks of the compiler."""
    names = [
        alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module == "__future__"
        for alias in node.names
    ]
    return sum({getattr(__future__, name).compiler_flag for name in names})


class _Far(BaseException):
    """Nothing of a script is to be read any more."""


_reading: _Reading | None = None


def read_script(script: Script, *, until: Callable[[], bool]) -> None:
    """Read a script, or go on with it, until that holds. Raises RunError for what it raises."""
    global _reading
    try:
        if _reading is None:
            _reading = _Reading(script)
        _reading.read(until)
    except Exception as error:
        raise RunError(
            f"{script.path} registers operators, and cannot be read by a worker: "
            f"{type(error).__name__}: {error}; move the operators to a module of their own"
        ) from error


def end_of_script() -> None:
    """Whoever starts workers says so: a worker that reads a script stops reading there."""
    if _reading is not None and _reading.is_under_way:
        raise _Far
