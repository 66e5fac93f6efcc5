"""Attributes as Python literals, which need no import but torch.

torch.float32               torch.float32
inf                         float("inf")
-3.4028234663852886e+38     torch.finfo(torch.float32).min
[2, -1]                     (2, -1), or [2, -1] in brackets
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import torch

from shardwright.errors import GraphError

_EXTREMES = {
    getattr(torch.finfo(dtype), end): f"torch.finfo({dtype}).{end}"
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    for end in ("min", "max")
}


def literal(value: Any) -> str:
    """One value that is no list. Raises GraphError for what has no literal."""
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, complex):
        return f"complex({literal(value.real)}, {literal(value.imag)})"
    if isinstance(value, float):
        return _EXTREMES.get(value, repr(value)) if math.isfinite(value) else f'float("{value}")'
    if value is None or isinstance(
        value, bool | int | torch.dtype | torch.layout | torch.memory_format
    ):
        return str(value)
    raise GraphError(f"{value!r} has no form in Python code")


def quoted(text: str) -> str:
    """Any text as a string literal in double quotes, all of it printable."""
    return "".join(_printable(sign) for sign in json.dumps(text, ensure_ascii=False))


def _printable(sign: str) -> str:
    if sign.isprintable():
        return sign
    return f"\\u{ord(sign):04x}" if ord(sign) <= 0xFFFF else f"\\U{ord(sign):08x}"


def described(text: str) -> str:
    """Text as it may stand in a docstring or a comment, on one line."""
    plain = "".join(sign if sign.isprintable() else "?" for sign in text)
    return plain.replace("\\", "\\\\").replace('"', "'")


def listed(texts: Sequence[str], *, brackets: bool = False) -> str:
    """A list of texts: a tuple, or in brackets."""
    if brackets:
        return f"[{', '.join(texts)}]"
    return f"({texts[0]},)" if len(texts) == 1 else f"({', '.join(texts)})"
