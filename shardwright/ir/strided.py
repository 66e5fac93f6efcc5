"""Operators that read and write memory by strides, wherever the memory begins.

torch counts the ``storage_offset`` of ``as_strided`` and its kin from the beginning of the memory
that a tensor shares. In a graph it counts from the tensor's own first element: what stands before
it is another's, where a tensor is the rows of a microbatch or a slot of an arena.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from shardwright.ir.bounds import guarded
from shardwright.ir.halves import is_sgd, widened
from shardwright.ir.operators import operator_name
from shardwright.torch_internals import OpOverload

BY_STRIDES = frozenset(
    f"aten.{name}.default" for name in ("as_strided", "as_strided_copy", "as_strided_scatter")
)
"""Operators, by name, that read their first input's memory rather than its elements."""


@cache
def callable_of(overload: OpOverload) -> Callable[..., Any]:
    """What runs an operator as graphs mean it: the overload itself, but for those `BY_STRIDES`.

    Indices that the overload would trust are looked at (`bounds`), and halves are widened where
    torch's kernel is wrong for them (`halves`).
    """
    if is_sgd(overload):
        return widened(overload)
    if operator_name(overload) not in BY_STRIDES:
        return guarded(overload)

    def from_first_element(x: torch.Tensor, *rest: Any) -> Any:
        *others, offset = rest
        counted = None if offset is None else offset + x.storage_offset()
        return overload(x, *others, counted)

    return from_first_element
