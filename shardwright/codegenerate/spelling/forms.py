"""The forms that a call can take in Python: what the rows of the tables are made of.

function("torch.cat")             torch.cat([x, y], dim=1)
method("view", spread="size")     x.view(2, -1)
infix("+", Binding.SUM)           x + y
attribute("mT")                   x.mT
"""

from __future__ import annotations

from shardwright.codegenerate.expression import Binding, Expression
from shardwright.codegenerate.spelling.arguments import PLAIN, Style, arguments, expression_of
from shardwright.codegenerate.spelling.call import Call, Row, slots


def words(text: str) -> list[str]:
    """The names in a text, for tables of many."""
    return text.split()


# --- the forms ----------------------------------------------------------------------------------


def function(name: str, style: Style = PLAIN) -> Row:
    """``name(x, y, key=value)``."""

    def row(call: Call) -> Expression | None:
        parts = arguments(call, style)
        return None if parts is None else Expression(f"{name}({', '.join(parts)})")

    return row


def method(name: str, style: Style = PLAIN) -> Row:
    """``x.name(y, key=value)``."""

    def row(call: Call) -> Expression | None:
        subject = call.operand(next(style.slots(call.op)).name).expression
        parts = arguments(call, style)
        if parts is None:
            return None
        return Expression(f"{subject.inside(Binding.ATOM)}.{name}({', '.join(parts[1:])})")

    return row


def infix(symbol: str, binding: Binding) -> Row:
    """``x + y``; None where other arguments than the two are given."""
    loose, tight = binding, Binding(min(binding + 1, Binding.ATOM))
    sides = {
        Binding.COMPARISON: (tight, tight),  # a chain of comparisons means something else
        Binding.POWER: (tight, Binding.UNARY),
    }
    left_binding, right_binding = sides.get(binding, (loose, tight))

    def row(call: Call) -> Expression | None:
        left, right, *others = slots(call.op)
        if any(call.arguments[slot.name] != slot.default for slot in others):
            return None
        first, second = (expression_of(call.arguments[slot.name]) for slot in (left, right))
        text = f"{first.inside(left_binding)} {symbol} {second.inside(right_binding)}"
        return Expression(text, binding)

    return row


def reflected(symbol: str, binding: Binding) -> Row:
    """``1 - x`` of a call that takes x first; None where other arguments are given."""

    def row(call: Call) -> Expression | None:
        right, left, *others = slots(call.op)
        if any(call.arguments[slot.name] != slot.default for slot in others):
            return None
        first, second = (expression_of(call.arguments[slot.name]) for slot in (left, right))
        tight = Binding(binding + 1)
        return Expression(f"{first.inside(binding)} {symbol} {second.inside(tight)}", binding)

    return row


def prefix(symbol: str) -> Row:
    """``-x``."""

    def row(call: Call) -> Expression | None:
        (only,) = slots(call.op)
        return Expression(
            f"{symbol}{call.operand(only.name).expression.inside(Binding.UNARY)}", Binding.UNARY
        )

    return row


def attribute(name: str) -> Row:
    """``x.name``."""

    def row(call: Call) -> Expression | None:
        (only,) = slots(call.op)
        return Expression(f"{call.operand(only.name).expression.inside(Binding.ATOM)}.{name}")

    return row


def first_of(*rows: Row) -> Row:
    """The first form that captures back."""

    def row(call: Call) -> Expression | None:
        return next((found for each in rows if (found := each(call)) is not None), None)

    return row
