"""What a buffer holds, as an expression that makes it bit for bit, where there is a short one.

Every form is compared with the tensor before it is given, but for which NaN a NaN is.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwright.codegenerate.spelling.forms import literal

LONGEST = 64
"""Elements that are written out one by one."""
LARGEST = 1 << 24
"""Elements of a tensor that is looked at; a larger one is nothing that code makes."""
COUNTABLE = 1 << 53
"""Up to here floating-point numbers count in steps of one."""
ROTARY_BASES = (10_000.0, 500_000.0, 1_000_000.0, 160_000.0, 100_000.0, 10_000_000.0)


def empty(shape: tuple[int, ...], dtype: torch.dtype, options: str = "") -> str:
    """``torch.empty(3, 4, dtype=torch.float64)``."""
    sizes = ", ".join(map(str, shape)) if shape else "()"
    return f"torch.empty({sizes}{_dtype(dtype)}{options})"


def contents(tensor: Tensor, options: str = "") -> str | None:
    """An expression that makes ``tensor``, None where there is no short one.

    ``options`` is put behind the arguments of what makes it, as ``, device="cpu"``.
    """
    if tensor.is_meta or tensor.numel() > LARGEST or tensor.layout is not torch.strided:
        return None
    found = tensor.detach().to("cpu", copy=False).resolve_conj().resolve_neg()
    for form in _FORMS.get(tensor.dtype, ()):
        for text, made in form(found, options):
            if _equal(found, made):
                return text
    return None


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    one, other = _comparable(one), _comparable(other)
    if one.is_floating_point():
        missing = one.isnan()
        if not torch.equal(missing, other.isnan()):
            return False
        one, other = one.masked_fill(missing, 0.5), other.masked_fill(missing, 0.5)
    return torch.equal(_bytes(one), _bytes(other))


def _comparable(tensor: Tensor) -> Tensor:
    """The same numbers in a dtype in which NaN can be told from others."""
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor.float() if tensor.dtype in _FLOAT8 else tensor


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _dtype(dtype: torch.dtype, default: torch.dtype = torch.float32) -> str:
    return "" if dtype == default else f", dtype={dtype}"


Candidates = Iterator[tuple[str, Tensor]]


def _uniform(tensor: Tensor, options: str) -> Candidates:
    """Zeros, ones, or one number everywhere."""
    if not tensor.numel():
        yield empty(tuple(tensor.shape), tensor.dtype, options), tensor
        return
    number = _items(tensor.reshape(-1)[0])
    shape, sizes = tuple(tensor.shape), ", ".join(map(str, tensor.shape))
    named = {0: torch.zeros, 1: torch.ones}.get(number)
    if named and tensor.dim():
        text = f"torch.{named.__name__}({sizes}{_dtype(tensor.dtype)}{options})"
        yield text, named(shape, dtype=tensor.dtype)  # which zero is it? it has a sign
    if tensor.dim() and tensor.numel() > 1:
        yield (
            f"torch.full({shape}, {literal(number)}, dtype={tensor.dtype}{options})",
            torch.full(shape, number, dtype=tensor.dtype),
        )


def _counted(tensor: Tensor, options: str) -> Candidates:
    """Numbers in equal steps along the last dimension."""
    if not tensor.numel() or not tensor.dim() or tensor.shape[-1] < 3:
        return
    row = tensor.reshape(-1, tensor.shape[-1])[0]
    start, step = row[0].item(), row[1].item() - row[0].item()
    if not step or not math.isfinite(step) or int(start) != start or int(step) != step:
        return
    start, step = int(start), int(step)
    stop = start + step * tensor.shape[-1]
    if not _can_count(tensor.dtype, start) or not _can_count(tensor.dtype, stop):
        return
    bounds = f"{stop}" if (start, step) == (0, 1) else f"{start}, {stop}, {step}"
    bounds = f"{start}, {stop}" if start and step == 1 else bounds
    made = torch.arange(start, stop, step, dtype=tensor.dtype)
    text = f"torch.arange({bounds}{_dtype(tensor.dtype, torch.int64)}{options})"
    if tensor.dim() == 1:
        yield text, made
    elif math.prod(tensor.shape[:-1]) == 1:
        yield f"{text}.reshape({_sizes(tensor)})", made.reshape(tensor.shape)
    else:
        yield f"{text}.expand({_sizes(tensor)}).clone()", made.expand(tensor.shape)


def _can_count(dtype: torch.dtype, number: int) -> bool:
    """Whether `torch.arange` takes a number as a bound."""
    if dtype.is_floating_point:
        return abs(number) <= min(COUNTABLE, torch.finfo(dtype).max)
    return torch.iinfo(dtype).min <= number <= torch.iinfo(dtype).max


def _triangular(tensor: Tensor, options: str) -> Candidates:
    """A causal mask: a lower or an upper triangle of one number in zeros."""
    if tensor.dim() < 2 or not tensor.numel() or min(tensor.shape[-2:]) < 2:
        return
    rows, columns = tensor.shape[-2:]
    shape = "" if tensor.dim() == 2 else f".expand({_sizes(tensor)}).clone()"
    if tensor.dim() > 2 and math.prod(tensor.shape[:-2]) == 1:
        shape = f".reshape({_sizes(tensor)})"
    whole = torch.ones(rows, columns, dtype=tensor.dtype)
    filled = f"torch.ones({rows}, {columns}{_dtype(tensor.dtype)}{options})"
    for name, made in (("tril", whole.tril()), ("triu", whole.triu(1))):
        diagonal = ", 1" if name == "triu" else ""
        yield f"torch.{name}({filled}{diagonal}){shape}", made.expand(tensor.shape)
    corner = tensor.reshape(-1, rows, columns)[0, 0, -1].item()
    if corner and tensor.dtype.is_floating_point:
        made = torch.full((rows, columns), corner, dtype=tensor.dtype).triu(1)
        filled = (
            f"torch.full(({rows}, {columns}), {literal(corner)}{_dtype(tensor.dtype)}{options})"
        )
        yield f"torch.triu({filled}, 1){shape}", made.expand(tensor.shape)


def _rotary(tensor: Tensor, options: str) -> Candidates:
    """The inverse frequencies of rotary embeddings."""
    if tensor.dim() != 1 or tensor.numel() < 2:
        return
    width = 2 * tensor.numel()
    for base in ROTARY_BASES:
        made = 1.0 / (base ** (torch.arange(0, width, 2, dtype=torch.int64).float() / width))
        steps = f"torch.arange(0, {width}, 2{options})"
        yield f"1.0 / {base} ** ({steps}.float() / {width})", made


def _listed(tensor: Tensor, options: str) -> Candidates:
    """Every number."""
    if tensor.numel() <= LONGEST:
        items = _items(tensor)
        text = f"torch.tensor({_numbers(items)}, dtype={tensor.dtype}{options})"
        yield text, torch.tensor(items, dtype=tensor.dtype)


_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_Form = Callable[[Tensor, str], Candidates]
_COUNTING: tuple[_Form, ...] = (_uniform, _counted, _triangular, _listed)
_FORMS: dict[torch.dtype, tuple[_Form, ...]] = {
    torch.float32: (_uniform, _counted, _triangular, _rotary, _listed),
    **dict.fromkeys((torch.float64, torch.float16, torch.bfloat16), _COUNTING),
    **dict.fromkeys((torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8), _COUNTING),
    torch.bool: (_uniform, _triangular, _listed),
    **dict.fromkeys((torch.complex64, torch.complex128), (_uniform, _listed)),
    **dict.fromkeys((torch.uint16, torch.uint32, torch.uint64, *_FLOAT8), (_listed,)),
}
"""What is tried for a dtype: forms whose operators torch has for it."""


def _items(tensor: Tensor) -> Any:
    """The numbers of a tensor, those of single precision with as few digits as tell them apart."""
    items = tensor.tolist()
    return _short(items) if tensor.dtype == torch.float32 else items


def _short(value: Any) -> Any:
    if isinstance(value, list):
        return list(map(_short, value))
    has_name = literal(value).startswith("torch.")
    return value if has_name else float(str(np.float32(value)))


def _sizes(tensor: Tensor) -> str:
    return ", ".join(map(str, tensor.shape))


def _numbers(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_numbers, value))}]"
    return literal(value)


MOST_CHARACTERS = 1 << 16
"""Characters of text that stand in a file for one tensor."""
MOST_BYTES = 1 << 24
"""Bytes of a tensor that is looked at; a larger one is not short in any text."""
LINE = 64
"""Characters on a line."""


def encoded(tensor: Tensor, options: str = "") -> str | None:
    """An expression that decodes ``tensor``, None where that would be too long.

    ``options`` is put behind the arguments of what makes it, as ``, device="cpu"``.
    """
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.nbytes > MOST_BYTES:
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
