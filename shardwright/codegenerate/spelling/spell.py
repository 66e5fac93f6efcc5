"""`spell`: one operator call as the Python that a person would write.

Comes in: a node and expressions for what it reads. Goes out: one expression. What always holds:
captured (`sw.capture`), it is a call of the node's very overload with the same arguments. An
overload without a row, and a call that Python's form would make another of, is written by the
overload's own name, ``torch.ops.aten.copy.default(x, y)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from keyword import iskeyword

from shardwright.codegenerate.expression import Expression
from shardwright.codegenerate.spelling.arguments import Style
from shardwright.codegenerate.spelling.call import Call, Mode
from shardwright.codegenerate.spelling.forms import function
from shardwright.codegenerate.spelling.table import ROWS
from shardwright.ir import IRGraph, IRNode

_BY_SCHEMA = Style(brackets=True, by_schema=True)
_UNTYPED = ("torch.ops.", "torch.linalg.", "torch.special.", "torch.tensordot(")
"""What mypy knows to give anything."""


def spell(
    graph: IRGraph, node: IRNode, operands: Mapping[int, Expression], mode: Mode
) -> Expression:
    """The call of ``node``, with ``operands`` for the values that it reads.

    What a node of several results gives is a tuple. Raises GraphError where the operator is not
    to be had, or where the node is a marker.
    """
    call = Call.of(graph, node, operands, mode)
    row = ROWS.get(node.op)
    found = row(call) if row is not None else None
    return by_overload(call) if found is None else found


def by_overload(call: Call) -> Expression:
    """The call by the overload's own name."""
    written = function(_overload(call.op), _BY_SCHEMA)(call)
    assert written is not None
    return written


@cache
def _overload(op: str) -> str:
    """``torch.ops.aten.add.Tensor``."""
    found = "torch.ops"
    for name in op.split("."):
        found = f'getattr({found}, "{name}")' if iskeyword(name) else f"{found}.{name}"
    return found


def is_typed(expression: Expression) -> bool:
    """Whether mypy knows the expression to be a tensor; what overloads give can be anything."""
    return not any(name in expression.text for name in _UNTYPED)
