"""A Python expression as text that knows how strongly it binds.

Line breaks are not its matter: the finished file is formatted as a whole.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class Binding(IntEnum):
    """How strongly an expression holds together; the language reference's order of operators."""

    LAMBDA = 0
    CONDITIONAL = 1
    OR = 2
    AND = 3
    NOT = 4
    COMPARISON = 5
    BIT_OR = 6
    BIT_XOR = 7
    BIT_AND = 8
    SHIFT = 9
    SUM = 10
    PRODUCT = 11
    UNARY = 12
    POWER = 13
    ATOM = 14
    """Names, numbers, calls, subscripts, attributes, and whatever stands in brackets."""


class Expression(NamedTuple):
    """Text, and its weakest operator outside of brackets."""

    text: str
    binding: Binding = Binding.ATOM

    def inside(self, binding: Binding) -> str:
        """The text as an operand of something that binds so strongly; in brackets if weaker."""
        return self.text if self.binding >= binding else f"({self.text})"

    def __str__(self) -> str:
        return self.text
