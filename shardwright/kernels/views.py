"""Which operators are views, found by running them on tensors without contents.

Comes in: an operator's call, and shapes and strides of what it reads. Goes out: for each of its
results which input's memory it lies in, from which element, and with which strides; or None where
the operator makes memory of its own. What always holds: a view has its input's dtype and values
(a conjugate or negative seen lazily is none).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from shardwright.ir.operators import flatten_results, join_call
from shardwright.ir.tensor_meta import torch_dtype
from shardwright.torch_internals import OpOverload, storage_key


class View(NamedTuple):
    """A result that lies in memory of input number ``source``; offset and strides in elements."""

    source: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


Described = tuple[tuple[int, ...], str, tuple[int, ...]]
"""Shape, dtype and strides."""


def find_views(
    overload: OpOverload, inputs: Sequence[Described], attrs: Mapping[str, Any]
) -> list[View] | None:
    """The operator's results as views, None where one of them is none."""
    tensors = [
        torch.empty_strided(shape, strides, dtype=torch_dtype(dtype), device="meta")
        for shape, dtype, strides in inputs
    ]
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            args, kwargs = join_call(overload, tensors, dict(attrs), "meta")
            made = flatten_results(overload(*args, **kwargs))
    except RuntimeError:
        return None  # it reads contents, or torch cannot run it without: a view does neither
    found = [_view(item, tensors) for item in made if isinstance(item, torch.Tensor)]
    return None if None in found or not found else [view for view in found if view is not None]


def _view(made: torch.Tensor, tensors: Sequence[torch.Tensor]) -> View | None:
    for source, tensor in enumerate(tensors):
        if storage_key(made) == storage_key(tensor):
            same = made.dtype == tensor.dtype and not made.is_conj() and not made.is_neg()
            offset = int(made.storage_offset())
            return View(source, offset, tuple(made.shape), made.stride()) if same else None
    return None
