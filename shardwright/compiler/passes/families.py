"""Which operators may be instructions of one chain.

Comes in: a node. Goes out: its `Family`; nodes of one family may fuse. What always holds: within a
family every step rounds as it did. An inner value is f32 where a chain computes in f32 and f64
where in f64; integers only enter where they become floats, or are compared with a small number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from shardwright.compiler.passes.elementwise import BITWISE, ROWS, Writer
from shardwright.compiler.passes.rewriter import arguments
from shardwright.ir import IRGraph, IRNode
from shardwright.kernels.chains import ChainInput, ChainOperand

CAST = "aten._to_copy.default"
LARGEST_EXACT = 2**24
"""Up to here every whole number is a float of 32 bits."""

_HALVES = frozenset({"f16", "bf16"})
_FLOATS = frozenset({"f64", "f32"}) | _HALVES
_INTEGERS = frozenset({"i64", "i32", "i16", "i8", "u8"})
_COMPARISONS = frozenset({"gt", "ge", "lt", "le", "eq", "ne"})
_LOGIC = frozenset({"logical_not", "logical_and", "logical_or", "isnan"})


class Family(NamedTuple):
    """What nodes must have alike to fuse: in what they compute, and how large their results are."""

    wide: str
    shape: tuple[int, ...]


def family(graph: IRGraph, node: IRNode) -> Family | None:
    """With what a node may fuse, None where it is not elementwise or its rounding would change."""
    if node.op not in ROWS and node.op not in BITWISE:
        return None
    made = graph.values[node.outputs[0]]
    dtypes = [graph.values[value_id].dtype for value_id in node.inputs]
    wide = _wide(node, made.dtype, dtypes)
    if wide is None or made.numel == 0 or length(node) is None:
        return None
    return Family(wide, made.shape)


def _wide(node: IRNode, made: str, dtypes: Sequence[str]) -> str | None:
    """In what the node computes; None where a chain would round in another way."""
    if node.op == CAST:
        return _wide_of_cast(node, made, dtypes[0])
    if node.op in BITWISE:
        return "f32" if {made, *dtypes} == {"bool"} else None
    floats = _FLOATS.intersection(dtypes)
    integers = _INTEGERS.intersection(dtypes)
    if len(floats) + len(integers) + ("bool" in dtypes) < len(set(dtypes)):
        return None
    name = node.op.split(".")[1]
    if name in _COMPARISONS or name in _LOGIC:
        one_width = floats <= {"f64"} or "f64" not in floats
        exact = not integers or (name in _COMPARISONS and _compares_small_number(node))
        wide = "f64" if "f64" in floats else "f32"
        return wide if made == "bool" and one_width and exact else None
    if made in _HALVES:
        return "f32" if floats == {made} and not integers else None
    if made == "f32":
        return "f32" if "f64" not in floats else None
    return "f64" if made == "f64" else None


def _wide_of_cast(node: IRNode, made: str, given: str) -> str | None:
    attrs = node.attrs
    plain = attrs["memory_format"] in (None, torch.preserve_format) and not attrs["pin_memory"]
    if not plain or attrs["layout"] not in (None, torch.strided):
        return None
    if given in _INTEGERS and made not in ("f32", "f64", "bool"):
        return None
    if not {given, made} <= _FLOATS | _INTEGERS | {"bool"} or made in _INTEGERS:
        return None
    return "f64" if "f64" in (given, made) else "f32"


def _compares_small_number(node: IRNode) -> bool:
    """Whether integers are compared with a number, so that they may be rounded to floats before."""
    other = node.attrs.get("other")
    return isinstance(other, (bool, int)) and abs(other) <= LARGEST_EXACT


_lengths: dict[tuple[str, str], int | None] = {}


def length(node: IRNode) -> int | None:
    """How many instructions the operator is with these attributes; None where it cannot be any."""
    key = (node.op, repr(node.attrs))
    if key not in _lengths:
        writer = Writer(ChainInput)
        try:
            made = instructions(writer, node)
        except (TypeError, ValueError):  # a number that is no float
            made = None
        _lengths[key] = None if made is None else len(writer.instructions)
    return _lengths[key]


def instructions(writer: Writer, node: IRNode) -> ChainOperand | None:
    """Append what computes the node's result."""
    given = arguments(node)
    if node.op in BITWISE:
        names = ("self", "other") if "other" in given else ("self",)
        return writer(BITWISE[node.op], *(given[name] for name in names))
    return ROWS[node.op](writer, given)
