"""The one table of element types: the short name that texts and files use, and torch's dtype.

The specification of the pipeline format names ten of them, `SPECIFIED`; the others extend it.
Native kernels know a dtype by its place in the table, so new ones come last.
"""

from __future__ import annotations

import torch

from shardwright.errors import GraphError

DTYPES: dict[str, torch.dtype] = {
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f8": torch.float8_e4m3fn,
    "bool": torch.bool,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "c64": torch.complex64,
    "c128": torch.complex128,
    "u16": torch.uint16,
    "u32": torch.uint32,
    "u64": torch.uint64,
}
SPECIFIED = tuple(DTYPES)[:10]
INTEGERS = frozenset(name for name in DTYPES if name[0] in "iu")
COMPLEX = frozenset(name for name in DTYPES if name[0] == "c")

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ITEMSIZES = {name: dtype.itemsize for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The short name of a torch dtype: ``torch.float32`` is ``f32``. Raises GraphError."""
    try:
        return _NAMES[dtype]
    except KeyError:
        raise GraphError(f"dtype {dtype} is not supported; known are {', '.join(DTYPES)}") from None


def describe_dtype(dtype: torch.dtype) -> str:
    """The short name of any torch dtype for a message; torch's own where it is not supported."""
    return _NAMES.get(dtype, str(dtype))


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a short name. Raises GraphError."""
    try:
        return DTYPES[name]
    except KeyError:
        raise GraphError(f"unknown dtype {name!r}; known are {', '.join(DTYPES)}") from None


def itemsize(name: str) -> int:
    """Bytes of one element. Raises GraphError."""
    size = _ITEMSIZES.get(name)
    return torch_dtype(name).itemsize if size is None else size
