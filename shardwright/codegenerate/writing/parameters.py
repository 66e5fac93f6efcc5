"""The names of the parameters that generated code gives its numbers to.

Comes in: what is called, as it is written. Goes out: the parameters of a layer of torch.nn with
their defaults, and a word for an operand of an operator by its schema.

    nn.Linear             in_features, out_features, bias=True, device=None, dtype=None
    torch.split, 1        split_size
    x.view, the last      width
"""

from __future__ import annotations

import ast
import inspect
from functools import cache
from typing import NamedTuple

import torch
from torch import nn

from shardwright.codegenerate.spelling.call import slots


class Parameter(NamedTuple):
    """A parameter; ``default`` is its text, None where it has to be given."""

    name: str
    default: str | None = None


Signature = tuple[Parameter, ...]

VALUE = "value"
"""What is known of a number that nothing names."""
SIZE, WIDTH = "size", "width"

_WORDS = {
    "dim0": "dim",
    "dim1": "dim",
    "dims": "dim",
    "end": "stop",
    "other": VALUE,
    "repeats": "repeat",
    "self": VALUE,
    "shape": SIZE,
    "sizes": SIZE,
}
"""Better words for some that schemas have."""
_LISTS = ("size", "sizes", "shape", "dims", "repeats")
"""Parameters whose items are arguments of their own in Python."""
_OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "offset",
    ast.Sub: "offset",
    ast.Mult: "scale",
    ast.Div: "divisor",
    ast.FloorDiv: "divisor",
    ast.Mod: "divisor",
    ast.Pow: "exponent",
}


@cache
def layer_signature(name: str) -> Signature | None:
    """The parameters of ``nn.Linear``; None of what is no layer, or takes any number of them."""
    package, _, cls = name.partition(".")
    found = getattr(nn, cls, None) if package == "nn" else None
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        return None
    parameters = inspect.signature(found).parameters.values()
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) or not _has_text(p) for p in parameters):
        return None
    return tuple(
        Parameter(p.name, None if p.default is p.empty else repr(p.default)) for p in parameters
    )


def _has_text(parameter: inspect.Parameter) -> bool:
    """Whether a default, if there is one, is what its representation says."""
    default = parameter.default
    return default is parameter.empty or isinstance(default, bool | int | float | str | None)


def operand_word(function: ast.expr, place: int, count: int) -> str:
    """A word for the operand at a place, of ``count``, of a function or a method."""
    if isinstance(function, ast.Name) and function.id == "range":
        return "depth" if count == 1 else ("start", "stop", "step")[place]
    path = ast.unparse(function)
    names = path.split(".")
    if not isinstance(function, ast.Attribute):
        return VALUE
    if path.startswith("torch.ops."):
        return _schema_word(names[-2], place)
    if names[0] in ("torch", "F"):
        word = _schema_word(names[-1], place)
    else:
        word = _schema_word(names[-1], place + 1)
    return WIDTH if word == SIZE and place == count - 1 else word


@cache
def _schema_word(operator: str, place: int) -> str:
    """What the first overload of an operator that has a parameter at a place calls it."""
    packet = getattr(torch.ops.aten, operator, None)
    for overload in packet.overloads() if packet is not None else ():
        names = [slot.name for slot in slots(f"aten.{operator}.{overload}")]
        listed = [name for name in names[: place + 1] if name in _LISTS]
        if listed or place < len(names):
            name = listed[0] if listed else names[place]
            return _WORDS.get(name, name)
    return VALUE


def operator_word(operator: ast.operator) -> str:
    """A word for a number beside ``+`` or ``*``."""
    return _OPERATORS.get(type(operator), VALUE)
