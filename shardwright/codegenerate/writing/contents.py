"""What a buffer holds, as an expression that makes it bit for bit, where there is a short one.

Every candidate is evaluated and compared with the tensor before it is given.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwright.codegenerate.spelling.forms import literal

LONGEST = 64
"""Elements that are written out one by one."""
LARGEST = 1 << 24
"""Bytes of a tensor that is looked at; a larger one is nothing that code makes."""
ROTARY_BASES = (10_000.0, 500_000.0, 1_000_000.0, 160_000.0, 100_000.0, 10_000_000.0)


def empty(shape: tuple[int, ...], dtype: torch.dtype, options: str = "") -> str:
    """``torch.empty(3, 4, dtype=torch.float64)``."""
    sizes = ", ".join(map(str, shape)) if shape else "()"
    return f"torch.empty({sizes}{_dtype(dtype)}{options})"


def contents(tensor: Tensor, options: str = "") -> str | None:
    """An expression that makes ``tensor``, None where there is no short one.

    ``options`` is put behind the arguments of what makes it, as ``, device="cpu"``.
    """
    if not _is_small(tensor):
        return None
    found = tensor.detach().to("cpu", copy=False).resolve_conj().resolve_neg()
    return next((text for text in _candidates(found, options) if _makes(text, found)), None)


def _is_small(tensor: Tensor) -> bool:
    """Whether a tensor holds plain numbers, and not too many to look at."""
    is_plain = tensor.layout is torch.strided and not tensor.is_quantized
    return is_plain and not tensor.is_meta and tensor.nbytes <= LARGEST


def _makes(text: str, tensor: Tensor) -> bool:
    """Whether an expression makes a tensor; not every dtype has every operator."""
    try:
        made = eval(text, {"torch": torch})
    except (OverflowError, RuntimeError, TypeError):
        return False
    alike = (made.shape, made.dtype) == (tensor.shape, tensor.dtype)
    return alike and torch.equal(_bytes(made), _bytes(tensor))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _dtype(dtype: torch.dtype, default: torch.dtype = torch.float32) -> str:
    return "" if dtype == default else f", dtype={dtype}"


def _candidates(tensor: Tensor, options: str) -> Iterator[str]:
    """Expressions that may make a tensor, the plainest first."""
    shape, end = tuple(tensor.shape), f"{_dtype(tensor.dtype)}{options})"
    if not tensor.numel():
        yield empty(shape, tensor.dtype, options)
        return
    if shape:
        yield from _filled(shape, tensor.reshape(-1)[0], end)
        leading = math.prod(shape[:-1]) == 1
        reshaped = f".reshape({', '.join(map(str, shape))})"
        if leading and (counted := _counted(tensor.reshape(-1), options)) is not None:
            yield counted + (reshaped if shape[1:] else "")
        if shape[1:] and math.prod(shape[:-2]) == 1:
            square = tensor.reshape(shape[-2:])
            for name, corner, diagonal in (("tril", (-1, 0), ""), ("triu", (0, -1), ", 1")):
                for whole in _filled(shape[-2:], square[corner], end):
                    yield f"torch.{name}({whole}{diagonal}){reshaped if shape[2:] else ''}"
    if tensor.dtype == torch.float32 and len(shape) == 1:
        width = 2 * shape[0]
        steps = f"torch.arange(0, {width}, 2{options}).float()"
        yield from (f"1.0 / {base} ** ({steps} / {width})" for base in ROTARY_BASES)
    if tensor.numel() <= LONGEST:
        yield f"torch.tensor({_numbers(_items(tensor))}, dtype={tensor.dtype}{options})"


def _filled(shape: tuple[int, ...], element: Tensor, end: str) -> Iterator[str]:
    """One number everywhere; ``end`` has the dtype and closes the call."""
    number = _items(element)
    if number in (0, 1):
        sizes = ", ".join(map(str, shape))
        yield f"torch.{'ones' if number else 'zeros'}({sizes}{end}"  # a zero has a sign
    if math.prod(shape) > 1:
        yield f"torch.full({shape}, {literal(number)}{end}"


def _counted(row: Tensor, options: str) -> str | None:
    """Whole numbers in equal steps."""
    if len(row) < 3 or row.is_complex():
        return None
    start, step = row[0].item(), row[1].item() - row[0].item()
    if not step or not math.isfinite(step) or int(start) != start or int(step) != step:
        return None
    start, step = int(start), int(step)
    bounds = [start, start + step * len(row), step]
    bounds = bounds[:2] if step == 1 else bounds
    bounds = bounds[1:] if not start and step == 1 else bounds
    texts = ", ".join(map(str, bounds))
    return f"torch.arange({texts}{_dtype(row.dtype, torch.int64)}{options})"


def _items(tensor: Tensor) -> Any:
    """The numbers of a tensor, those of single precision with as few digits as tell them apart."""
    items = tensor.tolist()
    return _short(items) if tensor.dtype == torch.float32 else items


def _short(value: Any) -> Any:
    if isinstance(value, list):
        return list(map(_short, value))
    has_name = literal(value).startswith("torch.")
    return value if has_name else float(str(np.float32(value)))


def _numbers(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_numbers, value))}]"
    return literal(value)


MOST_CHARACTERS = 1 << 16
"""Characters of text that stand in a file for one tensor."""
LINE = 64
"""Characters on a line."""


def encoded(tensor: Tensor, options: str = "") -> str | None:
    """An expression that decodes ``tensor``, None where that would be too long.

    ``options`` is put behind the arguments of what makes it, as ``, device="cpu"``.
    """
    if not _is_small(tensor):
        return None
    flat = tensor.detach().to("cpu", copy=False).contiguous().reshape(-1)
    data = zlib.compress(flat.view(torch.uint8).numpy().tobytes(), level=9)
    text = base64.b64encode(data).decode()
    if len(text) > MOST_CHARACTERS:
        return None
    lines = " ".join(f'"{text[at : at + LINE]}"' for at in range(0, len(text), LINE))
    held = f"bytearray(zlib.decompress(base64.b64decode({lines})))"
    shape = "" if tensor.dim() == 1 else f".reshape({tuple(tensor.shape)})"
    return f"torch.asarray({held}, dtype={tensor.dtype}{options}){shape}"
