"""``FILE.py:function``: a Python file of the user's, and the function in it that makes a model.

The file is run as a module named after it, with its folder on the import path, as ``python
FILE.py`` would; the function is called without arguments and returns ``(model, args, kwargs)``.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from shardwright.errors import CaptureError


class Example(NamedTuple):
    """A model and the arguments of one call of it."""

    model: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def load_example(target: str) -> Example:
    """Call the function that ``FILE.py:function`` names.

    Raises CaptureError where there is no such file or function, where it fails, or where it
    returns something else.
    """
    name, _, function = target.rpartition(":")
    if not name or not function:
        raise CaptureError(f"{target!r} names no function; write FILE.py:function")
    path = Path(name)
    if path.suffix != ".py" or not path.is_file():
        raise CaptureError(f"there is no Python file {name}")
    try:
        make = getattr(_load(path), function, None)
        made = make() if callable(make) else None
    except Exception as error:
        raise CaptureError(
            f"{target} raised {type(error).__name__}: {error}; add --debug to see where"
        ) from error
    if not callable(make):
        raise CaptureError(f"{name} defines no function {function}")
    return _as_example(made, target)


def _load(path: Path) -> ModuleType:
    """The file's module, run once and kept in ``sys.modules`` so that its classes can be found."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None, "a .py file always has a loader"
    sys.path.insert(0, str(path.parent.resolve()))
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _as_example(made: Any, target: str) -> Example:
    if isinstance(made, tuple) and len(made) == 3:
        model, args, kwargs = made
        right = isinstance(args, tuple | list) and (kwargs is None or isinstance(kwargs, dict))
        if isinstance(model, torch.nn.Module) and right:
            return Example(model, tuple(args), kwargs or {})
    raise CaptureError(
        f"{target} must return (model, args, kwargs): a torch.nn.Module, a tuple and a dict; "
        f"it returned {_described(made)}"
    )


def _described(made: Any) -> str:
    if isinstance(made, tuple):
        return f"({', '.join(type(part).__name__ for part in made)})"
    return f"a {type(made).__name__}"
