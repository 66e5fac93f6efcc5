"""Where a call of a traced program came from: its modules, its line, the settings it ran under.

A line is the deepest one of the model's forward that is neither torch's nor ours; settings are
those in force when the program called the operator; the flat module around the model is in no
scope.

torch.export notes a line by formatting the whole stack of every call, and keeps frames of
functions named ``forward`` only; it notes settings as regions, and loses a ``no_grad`` inside an
autocast. Here the stack is walked up to the line and the modules themselves, and torch is asked
for the settings: that is faster, and right.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from functools import cache
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.fx
from torch import nn

from shardwright.errors import CaptureError
from shardwright.ir.values import Scope, Source
from shardwright.torch_internals import MODULE_CALL as _CALL
from shardwright.tracing.failures import is_of_program, line_before
from shardwright.tracing.flat import PREFIX, FlatModel
from shardwright.tracing.functions import AUTOCAST_DEVICES, records_gradients

_KEY = "shardwright"
_FLAT_FORWARD = FlatModel.forward.__code__


class Note(NamedTuple):
    """The line of a call, whether gradients were recorded, and autocast's dtype by device type.

    ``modules`` are those that were being called, outermost first.
    """

    source: Source | None = None
    records: bool = True
    autocast: tuple[tuple[str, torch.dtype], ...] = ()
    modules: tuple[nn.Module, ...] = ()


def take_note(node: torch.fx.Node, frame: FrameType) -> None:
    """Note a call on its node; the program made it further up from ``frame``."""
    source, modules = _origin(frame)
    node.meta[_KEY] = Note(source, records_gradients(), _autocast(), modules)


def _origin(frame: FrameType | None) -> tuple[Source | None, tuple[nn.Module, ...]]:
    """The line of the program that is running, and the modules around it, outermost first."""
    source = None
    modules = []
    while frame is not None and frame.f_code is not _FLAT_FORWARD:
        code = frame.f_code
        if code is _CALL:
            modules.append(frame.f_locals["self"])
        elif source is None and is_of_program(code.co_filename):
            source = Source(code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return source, tuple(reversed(modules))


def line_of_program(frame: FrameType | None) -> Source | None:
    """The line of the program that is running, found upwards from ``frame``."""
    while frame is not None and frame.f_code is not _FLAT_FORWARD:
        if is_of_program(frame.f_code.co_filename):
            return Source(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


def refuse_here(message: str) -> CaptureError:
    """The error for what the program does at the line that is running."""
    return CaptureError(f"{line_before(line_of_program(sys._getframe(1)))}{message}")


def _autocast() -> tuple[tuple[str, torch.dtype], ...]:
    return tuple(
        (device, torch.get_autocast_dtype(device))
        for device in AUTOCAST_DEVICES
        if torch.is_autocast_enabled(device)
    )


def note_of(node: torch.fx.Node) -> Note | None:
    """The note on a node; None where the tracer made it without a call of an operator."""
    note: Note | None = node.meta.get(_KEY)
    return note


class Scopes:
    """Names the modules around nodes, each distinct chain once.

    ``model`` holds the modules, and ``roots`` are the paths in it before their names. A
    module that has several paths has the one that goes on from the module that called it.
    """

    def __init__(self, model: nn.Module, roots: tuple[str, ...] = (PREFIX,)) -> None:
        self._roots = tuple(f"{root}." for root in roots)
        self._paths: dict[nn.Module, list[str]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            self._paths.setdefault(module, []).append(path)
        self._known: dict[tuple[nn.Module, ...], tuple[Scope, ...]] = {}

    def of(self, note: Note) -> tuple[Scope, ...]:
        """The modules around a call, outermost first, the model itself left out."""
        if note.modules not in self._known:
            self._known[note.modules] = tuple(self._named(note.modules))
        return self._known[note.modules]

    def _named(self, modules: tuple[nn.Module, ...]) -> Iterator[Scope]:
        around = ""
        for module in modules:
            paths = self._paths.get(module)
            if paths is None:
                continue
            around = next((path for path in paths if path.startswith(f"{around}.")), paths[0])
            name = f"{type(module).__module__}.{type(module).__qualname__}"
            for root in self._roots:
                if around.startswith(root):
                    yield Scope(around.removeprefix(root), name, constructor_arguments(module))


_UNSAID = ("self", "device", "dtype", "inplace")
"""Parameters of constructors that parameters tell, or that a functional graph does not know."""


def constructor_arguments(module: nn.Module) -> tuple[tuple[str, Any], ...] | None:
    """What a layer of torch.nn was made with, by its attributes of those names.

    A bool says whether there is a parameter of that name. None for other modules, for layers that
    were given tensors, and for those with a forward of their own.
    """
    if not type(module).__module__.startswith("torch.nn.modules.") or "forward" in vars(module):
        return None
    found: dict[str, Any] = {}
    for name in _parameter_names(type(module)):  # type: ignore[arg-type]
        if name in module._parameters:
            found[name] = module._parameters[name] is not None
        elif (value := getattr(module, name, None)) is not None or hasattr(module, name):
            if not _is_number(value):
                return None
            found[name] = tuple(value) if isinstance(value, list | tuple) else value
    return tuple(found.items())


@cache
def _parameter_names(cls: type[nn.Module]) -> tuple[str, ...]:
    return tuple(name for name in inspect.signature(cls).parameters if name not in _UNSAID)


def _is_number(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_number, value))
    return value is None or isinstance(value, bool | int | float | str)
