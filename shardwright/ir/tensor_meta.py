"""TensorMeta: shape, dtype and strides of a tensor; the table of dtypes, and quantities as text.

A dtype is the short name that texts and files use. The specification of the pipeline format names
ten of them, `SPECIFIED`; the others extend it. Native kernels know a dtype by its place in
`DTYPES`, so new ones come last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """What is known of a tensor without its contents.

    strides
        In elements, one a dimension; None where the tensor is contiguous.
    """

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorMeta:
        """That of a tensor. Raises GraphError where its dtype is not supported."""
        shape = tuple(tensor.shape)
        return cls(shape, dtype_name(tensor.dtype), strides_or_none(shape, tensor.stride()))

    @property
    def numel(self) -> int:
        """How many elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """How many bytes the elements take."""
        return math.prod(self.shape) * itemsize(self.dtype)

    @property
    def full_strides(self) -> tuple[int, ...]:
        """The strides, those of a contiguous tensor written out."""
        return contiguous_strides(self.shape) if self.strides is None else self.strides

    @property
    def is_dense(self) -> bool:
        """Whether the strides only permute the dimensions of a contiguous tensor."""
        return is_dense(self.shape, self.strides)

    def same_order(self, strides: Sequence[int]) -> bool:
        """Whether a tensor of this shape and these strides has its elements in the same places."""
        return all(
            size <= 1 or ours == theirs
            for size, ours, theirs in zip(self.shape, self.full_strides, strides, strict=True)
        )

    def empty(self, device: str | torch.device = "meta") -> torch.Tensor:
        """A tensor like this, whose contents are whatever memory held."""
        dtype = torch_dtype(self.dtype)
        return torch.empty_strided(self.shape, self.full_strides, dtype=dtype, device=device)

    def __str__(self) -> str:
        return tensor_text(self.dtype, self.shape)


# --- strides --------------------------------------------------------------------------------------


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides in elements of a contiguous tensor of this shape."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def is_dense(shape: Sequence[int], strides: Sequence[int] | None) -> bool:
    """Whether strides only permute the dimensions of a contiguous tensor."""
    if strides is None:
        return True
    order = sorted(range(len(shape)), key=lambda i: (-strides[i], -shape[i]))
    expected = contiguous_strides([shape[i] for i in order])
    return all(shape[i] == 1 or strides[i] == want for i, want in zip(order, expected, strict=True))


def overlaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements may share a place."""
    if 0 in shape:
        return False
    reach = 0
    for stride, size in sorted((t, s) for t, s in zip(strides, shape, strict=True) if s > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def sent_strides(shape: Sequence[int], strides: Sequence[int] | None) -> tuple[int, ...] | None:
    """The strides that a tensor has where it arrives: its own, gaps included.

    One whose elements overlap, as an expanded one's do, arrives contiguous.
    """
    found = strides_or_none(shape, strides)
    return None if found is None or overlaps(shape, found) else found


def strides_or_none(shape: Sequence[int], strides: Sequence[int] | None) -> tuple[int, ...] | None:
    """``strides``, or None where they order the elements as a contiguous tensor does."""
    if strides is None:
        return None
    expected = contiguous_strides(shape)
    differs = any(
        size > 1 and found != want
        for size, found, want in zip(shape, strides, expected, strict=True)
    )
    return tuple(strides) if differs and math.prod(shape) > 0 else None


# --- quantities as people read them ---------------------------------------------------------------

MILLISECOND = 1e-3
"""Seconds."""
_SECONDS = ((1.0, "s"), (MILLISECOND, "ms"), (1e-6, "µs"))


def count_text(number: int, noun: str) -> str:
    """A number and its noun: ``1 tensor``, ``2 tensors``, ``2 batches``."""
    ending = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{ending}"


def format_bytes(count: int) -> str:
    """A number of bytes with a decimal unit: ``512 B``, ``1.2 kB``, ``90.9 MB``."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def seconds_text(seconds: float) -> str:
    """A duration to three digits: ``0.0123`` is ``12.3 ms``."""
    rounded = float(f"{seconds:.3g}")
    size, unit = next((row for row in _SECONDS if rounded >= row[0]), _SECONDS[-1])
    scaled = rounded / size
    return f"{scaled:.0f} {unit}" if scaled >= 1000 else f"{scaled:.3g} {unit}"


def tensor_text(dtype: str, shape: Sequence[int]) -> str:
    """A tensor's type: ``f32[8, 128]``."""
    return f"{dtype}[{', '.join(map(str, shape))}]"
