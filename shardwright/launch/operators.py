"""Operators that torch does not bring: loaded because a caller says so, never because a file does.

A pipeline ``requires`` such operators by name. `load_operators` imports the modules that the
caller gives, and only then lets graphs use the required names. A worker loads what its driver has:
the modules that registered the operators there, and the script that runs, where that did.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from shardwright.errors import GraphError, RunError
from shardwright.ir.operators import allow_operator, resolve
from shardwright.launch.script import Script, read_script
from shardwright.ops import registered
from shardwright.pipeline.schema import Document
from shardwright.torch_internals import registering_module

_MAIN = "__main__"


class Sources(msgspec.Struct, frozen=True):
    """What a worker loads to have a pipeline's operators: modules by name, then a script."""

    modules: tuple[str, ...] = ()
    script: Script | None = None


def sources_for_workers(document: Document, modules: Sequence[str]) -> Sources:
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
    return Sources(tuple(dict.fromkeys(found)), script)


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
