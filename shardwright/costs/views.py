"""Whether a call moves memory at all.

Some operators always return what they were given, seen otherwise (``transpose``); others do where
they can (``reshape``, ``contiguous``, a cast to the same type), which follows from how the values
lie. Invariant: a call that moves nothing takes no time.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch

from shardwright.costs.operations import FREE
from shardwright.ir import IRGraph, IRNode, IRValue
from shardwright.ir.operators import is_marker, resolve
from shardwright.ir.tensor_meta import contiguous_strides
from shardwright.torch_internals import schema_of

RESHAPES = frozenset(("aten.reshape.default", "aten.flatten.using_ints", "aten.unflatten.int"))
"""Views where the strides allow one, copies where not."""
SAME = frozenset(
    f"aten.{name}"
    for name in (
        "contiguous.default",
        "to.dtype",
        "to.device",
        "to.dtype_layout",
        "to.other",
        "type_as.default",
        "dropout.default",
        "expand_as.default",
    )
)
"""They return their first input itself where that is as it should be."""


def moves_nothing(
    graph: IRGraph, node: IRNode, shapes: Mapping[int, tuple[int, ...]] | None = None
) -> bool:
    """Whether what a node makes lies in the memory of its first input.

    ``shapes`` are those of values where a slot has a part of them.
    """
    if not node.inputs or not node.outputs or is_marker(node.op):
        return False
    source, made = graph.values[node.inputs[0]], graph.values[node.outputs[0]]
    if node.op in RESHAPES:
        shape, target = (shapes[v.id] if shapes else v.shape for v in (source, made))
        return _can_be_seen_as(shape, _strides(source, shape), target)
    if node.op in SAME:
        return _returns_itself(source, made, node)
    return node.op in FREE or _declares_a_view(node.op)


def _returns_itself(source: IRValue, made: IRValue, node: IRNode) -> bool:
    if node.attrs.get("train") and node.attrs.get("p"):
        return False  # dropout
    return (source.shape, source.dtype, source.strides) == (made.shape, made.dtype, made.strides)


def _strides(value: IRValue, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Those of a value; where it is a part, of this shape, it is dense and lies as the whole."""
    whole = value.strides or contiguous_strides(value.shape)
    if shape == value.shape:
        return whole
    found, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (whole[dim], -dim)):
        if whole[dim]:
            found[dim], step = step, step * shape[dim]
    return tuple(found)


@lru_cache(maxsize=4096)
def _can_be_seen_as(
    shape: tuple[int, ...], strides: tuple[int, ...], target: tuple[int, ...]
) -> bool:
    """Whether a tensor can be viewed in another shape; torch says so."""
    try:
        torch.empty_strided(shape, strides, device="meta").view(target)
    except RuntimeError:
        return False
    return True


@lru_cache(maxsize=1024)
def _declares_a_view(op: str) -> bool:
    """Whether the schema says that all that is returned lies in an input's memory."""
    returns = schema_of(resolve(op)).returns
    return bool(returns) and all(item.alias_info is not None for item in returns)
