"""Operators that torch does not bring: loaded because a caller says so, never because a file does.

A pipeline ``requires`` such operators by name. `load_operators` imports the modules that the
caller gives, and only then lets graphs use the required names. A worker loads what its driver has:
the modules that registered the operators there, and the script that runs, where that did.

A worker reads that script as ``__mp_main__``, as `multiprocessing` does, so what is under a main
guard is not run; and a statement at a time, until the operators that are wanted are there, so what
comes after them is not either: a script without a guard, which runs a pipeline at its end, need not
have one. Where a statement that registers operators starts workers as well, reading ends there.
"""

from __future__ import annotations
import __future__

import ast
import importlib
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import msgspec

from shardwright.errors import GraphError, RunError
from shardwright.ir.operators import allow_operator, resolve
from shardwright.ops import registered
from shardwright.pipeline.schema import Document
from shardwright.torch_internals import registering_module

_MAIN = "__main__"
_READ_AS = "__mp_main__"


class Script(msgspec.Struct, frozen=True):
    """A script as it was started: its path, the package it belongs to, and ``sys.argv``."""

    path: str
    package: str
    arguments: tuple[str, ...]


class OperatorSources(msgspec.Struct, frozen=True):
    """What a worker loads to have a pipeline's operators: modules by name, then a script."""

    modules: tuple[str, ...] = ()
    script: Script | None = None


def sources_for_workers(document: Document, modules: Sequence[str]) -> OperatorSources:
    """``modules``, and what this process has the required operators from.

    Raises RunError where that is neither a module nor a script, as in a notebook.
    """
    found = list(modules)
    script = None
    for op in document.requires or ():
        module = _module_of(op)
        if module == _MAIN:
            script = _running_script(op)
        elif module:
            found.append(module)
    return OperatorSources(tuple(dict.fromkeys(found)), script)


def _module_of(op: str) -> str:
    """The module that registered an operator in this process; ``""`` where none is known."""
    known = registered(op)
    if known is not None:
        return known.module
    namespace, name, _ = op.split(".", 2)
    return registering_module(f"{namespace}::{name}")


def _running_script(op: str) -> Script:
    main = sys.modules[_MAIN]
    path = Path(getattr(main, "__file__", None) or "")
    if not path.is_file():
        raise RunError(
            f"the operator {op!r} is registered in what runs, which is no file that worker "
            "processes can read; move it to a module, or run with in_process=True"
        )
    return Script(str(path.resolve()), main.__package__ or "", tuple(sys.argv))


def load_operators(
    document: Document, modules: Sequence[str], script: Script | None = None
) -> None:
    """Import ``modules`` and find every operator that ``document`` requires, in ``script`` at last.

    Raises RunError where a module cannot be imported or an operator is not to be had.
    """
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise RunError(f"the module {module!r} cannot be imported: {error}") from error
    required = document.requires or ()
    if modules or script is not None:
        for op in required:
            allow_operator(op)
    if script is not None:
        read_script(script, until=lambda: all(map(_is_there, required)))
    for op in required:
        if not _is_there(op):
            named = " nor ".join(map(repr, (*modules, *([script.path] if script else []))))
            raise RunError(
                f"the pipeline requires the operator {op!r}, which "
                f"{named or 'nothing that is loaded'} registers; name "
                'the module that does: modules=("package.module",) or --import package.module'
            )


def _is_there(op: str) -> bool:
    try:
        resolve(op)
    except GraphError:
        return False
    return True


# --- the script that runs -------------------------------------------------------------------------


class _Reading:
    """A script, the part of it that is to be read, and the module that it makes."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.is_under_way = False
        tree = ast.parse(Path(script.path).read_bytes(), script.path)
        self._statements = deque(tree.body)
        self._flags = _flags_of(tree)
        self._module = ModuleType(_READ_AS, ast.get_docstring(tree))
        self._module.__file__ = script.path
        self._module.__package__ = script.package
        sys.modules["__main__"] = sys.modules[_READ_AS] = self._module
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
