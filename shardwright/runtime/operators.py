"""Operators that torch does not bring: loaded because a caller says so, never because a file does.

A pipeline ``requires`` such operators by name. `load_operators` imports the modules that the
caller gives, and only then lets graphs use the required names.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from shardwright.errors import GraphError, RunError
from shardwright.ir.operators import allow_operator, resolve
from shardwright.pipeline.schema import Document


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
