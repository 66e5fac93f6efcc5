"""Tensors of every dtype and of odd shapes, for files to hold."""

from __future__ import annotations

import torch
from torch._export.serde.serialize import _TORCH_TO_SERIALIZE_DTYPE

from shardwright.ir.tensor_meta import DTYPES, torch_dtype

FORMATS = ("safetensors", "torch.save", "torch.export")
SUFFIXES = {"safetensors": ".safetensors", "torch.save": ".pt", "torch.export": ".pt2"}

# Older releases of torch cannot write all unsigned integers; tests/pipeline/test_archive.py.
UNWRITTEN = [name for name in DTYPES if torch_dtype(name) not in _TORCH_TO_SERIALIZE_DTYPE]
NOT_HELD = {("safetensors", "c128"), *(("torch.export", name) for name in UNWRITTEN)}


def sample(dtype: str, *shape: int) -> torch.Tensor:
    """Values that every dtype holds exactly."""
    count = torch.Size(shape).numel()
    return (torch.arange(count).reshape(shape) % 7 - 3).to(torch_dtype(dtype))


def holds(format: str) -> list[str]:
    """The dtypes that files of a format can hold."""
    return [dtype for dtype in DTYPES if (format, dtype) not in NOT_HELD]


def samples(format: str = "safetensors") -> dict[str, torch.Tensor]:
    """A tensor a dtype, then odd ones."""
    tensors = {f"layers.0.{dtype}": sample(dtype, 5, 6) for dtype in holds(format)}
    tensors["scalar"] = torch.tensor(2.5)
    tensors["empty"] = torch.zeros(0, 3)
    tensors["transposed"] = sample("i16", 3, 4).t()
    tensors["part"] = sample("f64", 6, 4)[2:4]
    tensors["tied"] = tensors["layers.0.f32"]
    tensors["4d"] = sample("bf16", 2, 3, 4, 5)
    tensors["parameter"] = torch.nn.Parameter(sample("f16", 3))
    tensors["a name/with spaces, ünïcode"] = sample("bool", 2)
    return tensors


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in dtype, shape and every bit."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return (
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        if (a.dim())
        else bool(a == b)
    )
