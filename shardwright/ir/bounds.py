"""Indices that kernels of torch take on trust, held to their bounds before each call.

Most of torch's operators look at the indices that they are given; those listed here read or write
wherever an index says. In a program these come from a forward; in a file they may be anything.
Operators that leave memory as they find it are run so that nothing of it is seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from shardwright.ir.operators import operator_name, signature
from shardwright.torch_internals import FakeTensor, OpOverload, assert_later

Call = Mapping[str, Any]
"""Arguments of a call by name."""


class Bounds(NamedTuple):
    """An argument that holds indices, the range that they are from, and one that is skipped."""

    indices: str
    low: int
    end: Callable[[Call], int]
    skipped: str | None = None


def _cells(dims: int) -> Callable[[Call], int]:
    return lambda call: math.prod(call["self"].shape[-dims:])


def _classes(call: Call) -> int:
    shape: Sequence[int] = call["self"].shape
    return shape[1] if len(shape) > 1 else shape[0]


BOUNDS: Mapping[str, Bounds] = {
    **{
        f"aten.{name}{dims}d{end}.default": Bounds("indices", 0, _cells(dims))
        for name, end in (
            ("max_pool", "_with_indices_backward"),
            ("adaptive_max_pool", "_backward"),
        )
        for dims in (2, 3)
    },
    **{
        f"aten.{name}.default": Bounds("target", 0, _classes, "ignore_index")
        for name in ("nll_loss_backward", "nll_loss2d_backward")
    },
    "aten.embedding_dense_backward.default": Bounds(
        "indices", 0, lambda call: call["num_weights"], "padding_idx"
    ),
    "aten.linalg_lu_solve.default": Bounds("pivots", 1, lambda call: call["LU"].shape[-1] + 1),
    "aten.lu_unpack.default": Bounds("LU_pivots", 1, lambda call: call["LU_data"].shape[-2] + 1),
}
"""By the operator's name."""

UNFILLED = frozenset(
    f"aten.{name}"
    for name in (
        *("empty.memory_format", "empty_like.default", "empty_permuted.default"),
        *("empty_strided.default", "new_empty.default", "new_empty_strided.default"),
    )
)
"""Operators whose results hold what was in memory before."""


def guarded(overload: OpOverload) -> Callable[..., Any]:
    """What runs an operator with its indices looked at, and no memory of others in its result."""
    name = operator_name(overload)
    if name in UNFILLED:
        return lambda *args, **kwargs: overload(*args, **kwargs).zero_()
    if name not in BOUNDS:
        return overload
    bounds = BOUNDS[name]
    names = [parameter.name for parameter in signature(overload).parameters]

    def checked(*args: Any, **kwargs: Any) -> Any:
        _check(name, bounds, dict(zip(names, args, strict=False)) | kwargs)
        return overload(*args, **kwargs)

    return checked


def _check(name: str, bounds: Bounds, call: Call) -> None:
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
