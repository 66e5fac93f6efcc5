"""Operators that torch does not bring: loaded because a caller says so, never because a file does.

A pipeline ``requires`` such operators by name. `load_operators` imports the modules that the
caller gives, and only then lets graphs use the required names.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from shardwright.dimops import registered
from shardwright.errors import GraphError, RunError
from shardwright.ir.operators import allow_operator, resolve
from shardwright.pipeline.schema import Document


def modules_for_workers(document: Document, modules: Sequence[str]) -> tuple[str, ...]:
    """What workers import: ``modules``, and those in which this process registered operators.

    Raises RunError where such an operator was registered in a script, which none can import.
    """
    found = list(modules)
    for op in document.requires or ():
        known = registered(op)
        if known is not None and known.module == "__main__":
            raise RunError(
                f"the operator {op!r} is registered in the script that runs, which worker "
                "processes cannot import; move it to a module, or run with in_process=True"
            )
        if known is not None:
            found.append(known.module)
    return tuple(dict.fromkeys(found))


def load_operators(document: Document, modules: Sequence[str]) -> None:
    """Import ``modules`` and find every operator that ``document`` requires.

    Raises RunError where a module cannot be imported or an operator is not to be had.
    """
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise RunError(f"the module {module!r} cannot be imported: {error}") from error
    for op in document.requires or ():
        if modules:
            allow_operator(op)
        try:
            resolve(op)
        except GraphError:
            raise RunError(
                f"the pipeline requires the operator {op!r}, which "
                f"{' nor '.join(map(repr, modules)) or 'nothing that is loaded'} registers; name "
                'the module that does: modules=("package.module",) or --import package.module'
            ) from None
