"""Attributes as JSON: tagged where JSON has no such value.

What always holds: ``from_json(to_json(value)) == value`` for every value an attribute may have,
and the JSON form holds no name of Python or of a private enumeration.

    torch.float32             {"dtype": "f32"}
    torch.strided             {"layout": "strided"}
    torch.contiguous_format   {"memory_format": "contiguous_format"}
    SLOT                      {"device": "slot"}
    inf, -inf, nan            {"float": "inf"}, ...
    1+2j                      {"complex": [1.0, 2.0]}
    Input(3)                  {"input": 3}
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from shardwright.errors import GraphError
from shardwright.ir.dtypes import dtype_name, torch_dtype
from shardwright.ir.values import SLOT, Input

LAYOUTS = {
    str(item).removeprefix("torch."): item
    for item in (
        torch.strided,
        torch.sparse_coo,
        torch.sparse_csr,
        torch.sparse_csc,
        torch.sparse_bsr,
        torch.sparse_bsc,
        torch.jagged,
    )
}
MEMORY_FORMATS = {
    str(item).removeprefix("torch."): item
    for item in (
        torch.contiguous_format,
        torch.preserve_format,
        torch.channels_last,
        torch.channels_last_3d,
    )
}


def is_attribute(value: Any) -> bool:
    """Whether an attribute may be this; tuples and subclasses of the plain types may not."""
    if type(value) is list:
        return all(is_attribute(item) for item in value)
    return type(value) in _KINDS


def to_json(value: Any) -> Any:
    """An attribute as plain JSON values. Raises GraphError for what an attribute cannot be."""
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, complex):
        return {"complex": [to_json(value.real), to_json(value.imag)]}
    for kind, tag, encode in _TAGS:
        if isinstance(value, kind):
            return {tag: encode(value)}
    raise GraphError(f"an attribute cannot be a {type(value).__name__}: {value!r}")


def from_json(data: Any) -> Any:
    """The attribute that JSON values stand for. Raises GraphError."""
    if isinstance(data, list):
        return [from_json(item) for item in data]
    if not isinstance(data, dict):
        return data
    if len(data) == 1:
        ((tag, content),) = data.items()
        if tag in _DECODERS:
            return _decode(tag, content)
    raise GraphError(f"unknown tagged value {data!r}; known tags are {', '.join(_DECODERS)}")


def _decode(tag: str, content: Any) -> Any:
    try:
        return _DECODERS[tag](content)
    except (KeyError, IndexError, TypeError, ValueError):
        raise GraphError(f"{content!r} is no value of the tag {tag!r}") from None


def _slot(content: Any) -> Any:
    return {"slot": SLOT}[content]


def _short_name(value: Any) -> str:
    return str(value).removeprefix("torch.")


def _input(content: Any) -> Input:
    if type(content) is not int or content < 0:
        raise ValueError(content)
    return Input(content)


_TAGS: tuple[tuple[type, str, Callable[[Any], Any]], ...] = (
    (torch.dtype, "dtype", dtype_name),
    (torch.layout, "layout", _short_name),
    (torch.memory_format, "memory_format", _short_name),
    (type(SLOT), "device", lambda value: "slot"),
    (Input, "input", lambda value: value.index),
)
_KINDS = {type(None), bool, int, float, complex, str, *(kind for kind, _, _ in _TAGS)}
_DECODERS: dict[str, Callable[[Any], Any]] = {
    "dtype": torch_dtype,
    "layout": LAYOUTS.__getitem__,
    "memory_format": MEMORY_FORMATS.__getitem__,
    "device": _slot,
    "input": _input,
    "float": {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}.__getitem__,
    "complex": lambda parts: complex(from_json(parts[0]), from_json(parts[1])),
}
