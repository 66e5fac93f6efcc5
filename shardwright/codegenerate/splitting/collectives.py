"""Collectives as nodes of a stage's graph, and how they are written.

A collective is a marker (`shardwright.ir.operators.is_marker`): one input, one output, and as
attributes the mesh axis that it goes along and what the function of that name in
`shardwright.codegenerate.support.exchanges` takes behind it. `spell_collective` gives its call,
``all_gather(x, self.slots["tensor"], dim=2, sizes=(8, 8))``; the class that it stands in has
``self.slots``, a `support.slots.Slots`. `pasting` gives the text of the functions.

What always holds: the collectives of a partition's slots are the same, in one order; what differs
between slots is found at run time from ``slots``. A collective of which only one slot would need
the result is done by all, or by none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwright.codegenerate.spelling.literals import listed, literal
from shardwright.errors import CodegenError
from shardwright.ir import IRNode

SLOTS = "slots"
"""The attribute of a generated class that knows where in the mesh it is."""

COLLECTIVES: Mapping[str, tuple[str, ...]] = {
    "all_reduce": (),
    "all_reduce_extreme": ("op",),
    "all_gather": ("dim", "sizes"),
    "all_gather_for_parts": ("dim", "sizes"),
    "reduce_scatter": ("dim", "sizes"),
    "own_slice": ("dim", "sizes"),
    "all_to_all": ("split_dim", "split_sizes", "join_dim", "join_sizes"),
    "copy_to_parts": (),
    "term_of_first": (),
    "gradient_to_first": (),
}
"""The attributes of each collective beside ``axis``, in the order of its arguments."""

ALONE = frozenset({"term_of_first", "gradient_to_first"})
"""Those in which nothing is communicated, forward or backward."""


def is_collective(node: IRNode) -> bool:
    """Whether a node of a stage is a collective."""
    return node.op in COLLECTIVES


def spell_collective(node: IRNode, operands: Mapping[int, str]) -> str:
    """The call of a collective; ``operands`` are expressions by value id.

    Raises CodegenError where the node is none.
    """
    if not is_collective(node):
        raise CodegenError(f"{node.op} is no collective; there are {', '.join(COLLECTIVES)}")
    arguments = [str(operands[node.inputs[0]]), f"self.{SLOTS}[{_text(node.attrs['axis'])}]"]
    arguments += [f"{name}={_text(node.attrs[name])}" for name in COLLECTIVES[node.op]]
    return f"{node.op}({', '.join(arguments)})"


def _text(value: Any) -> str:
    """A literal; lists are written as tuples."""
    if isinstance(value, list):
        return listed([_text(item) for item in value])
    return literal(value)
