"""What may stand in each place of a call that a file writes out, by the operator's schema.

torch takes a dtype for a number, since both are numbers to it, and fills in what a call leaves out.
A file is held to more: every argument stands, and is of the kind that the schema says, so that what
a file computes is all in the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardwright.errors import GraphError
from shardwright.ir.operators import Parameter, operator_name, signature
from shardwright.ir.values import SLOT
from shardwright.torch_internals import OpOverload

_INT64 = range(-(2**63), 2**63)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and value in _INT64


def _is_float(value: Any) -> bool:
    return isinstance(value, float) or (_is_int(value) and not isinstance(value, bool))


def _is_number(value: Any) -> bool:
    return _is_float(value) or isinstance(value, bool | complex)


_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "int": ("a whole number", _is_int),
    "float": ("a number", _is_float),
    "number": ("a number", _is_number),
    "complex": ("a number", lambda value: _is_float(value) or isinstance(value, complex)),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "Tensor": ("a tensor", _is_number),
    "str": ("a string", lambda value: isinstance(value, str)),
    "ScalarType": ("a dtype", lambda value: isinstance(value, torch.dtype)),
    "Layout": ("a layout", lambda value: isinstance(value, torch.layout)),
    "MemoryFormat": ("a memory format", lambda value: isinstance(value, torch.memory_format)),
    "Device": ("the slot's device", lambda value: value is SLOT),
}
"""Kinds of arguments by the schema's name for them: in words, and whether a value is one.

torch takes a number for a tensor, as in ``x * 2``, and a tensor of one element for a number.
"""


def check_written(
    overload: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    is_tensor: Callable[[Any], bool],
) -> None:
    """Raise GraphError where a call lacks an argument, has one too many, or one of another kind."""
    parameters = signature(overload).parameters
    by_place = [p for p in parameters if not p.keyword_only]
    by_name = {p.name: p for p in parameters if p.keyword_only}
    if len(args) != len(by_place) or kwargs.keys() != by_name.keys():
        raise GraphError(
            f"has {len(args)} positional arguments and the keywords "
            f"{', '.join(sorted(kwargs)) or 'none'}; every argument of the operator's schema is "
            f"written, defaults too: {', '.join(p.name for p in by_place) or 'none'} by position, "
            f"{', '.join(by_name) or 'none'} by keyword"
        )
    given = [*zip(by_place, args, strict=True), *((p, kwargs[n]) for n, p in by_name.items())]
    for parameter, value in given:
        if not (
            _is_default(parameter, value) or _fits(parameter.type, parameter, value, is_tensor)
        ):
            raise GraphError(
                f"has {_described(value, is_tensor)} for the argument {parameter.name!r}; "
                f"{operator_name(overload)} takes {_expected(parameter.type)} there"
            )


def _is_default(parameter: Parameter, value: Any) -> bool:
    """Whether it is the schema's own default: torch spells that of a memory format as a number."""
    default = parameter.default
    return not parameter.required and type(value) is type(default) and bool(value == default)


def _fits(kind: str, parameter: Parameter, value: Any, is_tensor: Callable[[Any], bool]) -> bool:
    if kind.startswith("Optional["):
        return value is None or _fits(_inner(kind), parameter, value, is_tensor)
    if kind.startswith("List["):
        if isinstance(value, list):
            return all(_fits(_inner(kind), parameter, item, is_tensor) for item in value)
        return parameter.length is not None and _fits(_inner(kind), parameter, value, is_tensor)
    if is_tensor(value):
        return kind in ("Tensor", "number")
    return kind in _KINDS and _KINDS[kind][1](value)


def _inner(kind: str) -> str:
    """``List[Optional[Tensor]]`` is of ``Optional[Tensor]``."""
    return kind.partition("[")[2].removesuffix("]")


def _expected(kind: str) -> str:
    if kind.startswith("Optional["):
        return f"{_expected(_inner(kind))} or null"
    if kind.startswith("List["):
        return f"a list, each {_expected(_inner(kind))}"
    return _KINDS[kind][0] if kind in _KINDS else "null"


def _described(value: Any, is_tensor: Callable[[Any], bool]) -> str:
    if is_tensor(value):
        return "a tensor"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:76]} ..."
