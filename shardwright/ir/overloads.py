"""What runs an operator: torch's overload, or what a graph means by it where that differs.

- torch counts the ``storage_offset`` of ``as_strided`` and its kin from the beginning of the memory
  that a tensor shares. In a graph it counts from the tensor's own first element: what is before
  it is another's, where a tensor is the rows of a microbatch or a slot of an arena.
- Most operators look at the indices that they are given; those with `IndexBounds` in `trusting`
  read or write wherever an index says. In a program these come from a forward; in a file they may
  be anything.
- Operators that leave memory as they find it are run so that nothing of it is seen.
- Fused SGD of 16-bit floats on the CPU (seen in torch 2.13) loads the second half of each vector
  from the wrong place: parameters of 16 elements or more get other values, and memory behind the
  momentum is read. Such tensors are widened, updated by the same kernel, and rounded once, as
  torch's other fused optimizers do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from shardwright.ir.operators import operator_name, signature
from shardwright.ir.trusting import IndexBounds, trusted
from shardwright.torch_internals import FakeTensor, OpOverload, assert_later

BY_STRIDES = frozenset(
    f"aten.{name}.default" for name in ("as_strided", "as_strided_copy", "as_strided_scatter")
)
"""Operators, by name, that read their first input's memory rather than its elements."""


@cache
def callable_of(overload: OpOverload) -> Callable[..., Any]:
    """What runs an operator as graphs mean it: the overload itself, but where it differs."""
    if _is_sgd(overload):
        return _widened(overload)
    if operator_name(overload) not in BY_STRIDES:
        return _guarded(overload)

    def from_first_element(x: torch.Tensor, *rest: Any) -> Any:
        *others, offset = rest
        counted = None if offset is None else offset + x.storage_offset()
        return overload(x, *others, counted)

    return from_first_element


# --- indices --------------------------------------------------------------------------------------

UNFILLED = frozenset(
    f"aten.{name}"
    for name in (
        *("empty.memory_format", "empty_like.default", "empty_permuted.default"),
        *("empty_strided.default", "new_empty.default", "new_empty_strided.default"),
    )
)
"""Operators whose results hold what was in memory before."""


def _guarded(overload: OpOverload) -> Callable[..., Any]:
    """What runs an operator with its indices looked at, and no memory of others in its result."""
    name = operator_name(overload)
    if name in UNFILLED:
        return lambda *args, **kwargs: overload(*args, **kwargs).zero_()
    row = trusted(overload)
    if row is None or row.indices is None:
        return overload
    bounds = row.indices
    names = [parameter.name for parameter in signature(overload).parameters]

    def checked(*args: Any, **kwargs: Any) -> Any:
        _check(name, bounds, dict(zip(names, args, strict=False)) | kwargs)
        return overload(*args, **kwargs)

    return checked


def _check(name: str, bounds: IndexBounds, call: Mapping[str, Any]) -> None:
    """Raise IndexError where an index is outside; on a GPU the call after it fails instead."""
    indices, end = call[bounds.indices], bounds.end(call)
    if not indices.numel() or isinstance(indices, FakeTensor):  # Or nothing is computed.
        return
    skipped = call[bounds.skipped] if bounds.skipped else None
    if indices.device.type == "cpu" and skipped is None:
        low, high = torch.aminmax(indices)
        inside = bool(low >= bounds.low) and bool(high < end)
    else:
        each = (indices >= bounds.low) & (indices < end)
        each = each if skipped is None else each | (indices == skipped)
        if indices.device.type != "cpu":
            assert_later(each.all())
            return
        inside = bool(each.all())
    if not inside:
        raise IndexError(
            f"{name} is given {bounds.indices} from {int(indices.min())} to {int(indices.max())}; "
            f"they must be from {bounds.low} to {end - 1}"
        )


# --- fused SGD of 16-bit floats -------------------------------------------------------------------

_HALVES = (torch.float16, torch.bfloat16)
_LISTS = 3
"""Parameters, gradients and momenta, the operator's first arguments and its results."""


def _is_sgd(overload: OpOverload) -> bool:
    """Whether an operator is torch's fused SGD, in place or not."""
    return overload.namespace == "aten" and overload.overloadpacket in (
        torch.ops.aten._fused_sgd,
        torch.ops.aten._fused_sgd_,
    )


def _widened(overload: OpOverload) -> Callable[..., Any]:
    """Fused SGD that is right for halves too. In place it writes what it was given."""
    in_place = overload.overloadpacket is torch.ops.aten._fused_sgd_

    def step(*args: Any, **kwargs: Any) -> Any:
        given: Sequence[list[torch.Tensor]] = args[:_LISTS]
        if not any(_is_wrong(tensor) for tensors in given for tensor in tensors):
            return overload(*args, **kwargs)
        wide = [[_wide(tensor) for tensor in tensors] for tensors in given]
        made = overload(*wide, *args[_LISTS:], **kwargs)
        results = wide if in_place else made
        pairs = [zip(news, olds, strict=True) for news, olds in zip(results, given, strict=True)]
        if not in_place:
            return tuple([new.to(old.dtype) for new, old in pair] for pair in pairs)
        for pair in pairs:
            for new, old in pair:
                if new is not old:
                    old.copy_(new)
        return None

    return step


def _is_wrong(tensor: torch.Tensor) -> bool:
    return tensor.dtype in _HALVES and tensor.device.type == "cpu"


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if _is_wrong(tensor) else tensor
