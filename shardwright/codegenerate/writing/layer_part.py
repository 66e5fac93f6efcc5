"""A node of a module, as what writes a layer's constructor reads it, and texts of its numbers.

Comes in: a node. Goes out: its arguments by the schema's names, and those that a constructor says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwright.codegenerate.spelling.forms import parameters
from shardwright.codegenerate.spelling.literals import listed, literal
from shardwright.ir import IRNode, IRValue, resolve
from shardwright.ir.operators import named_arguments


@dataclass(frozen=True, slots=True)
class Part:
    """A node of a module: its arguments by the schema's names, tensors as values."""

    node: IRNode
    arguments: Mapping[str, Any]

    @classmethod
    def of(cls, node: IRNode, values: Mapping[int, IRValue]) -> Part:
        """The node's call."""
        inputs = [values[i] for i in node.inputs]
        return cls(node, named_arguments(resolve(node.op), inputs, node.attrs))

    def has(self, name: str) -> bool:
        """Whether the argument ``name`` is a tensor."""
        return isinstance(self.arguments[name], IRValue)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the tensor ``name``."""
        value = self.arguments[name]
        assert isinstance(value, IRValue)
        return value.shape

    def is_plain(self, *said: str) -> bool:
        """Whether every number but those ``said`` is the schema's default."""
        return all(
            slot.name in said or self.has(slot.name) or self.arguments[slot.name] == slot.default
            for slot in parameters(self.node.op)
        )


# --- texts --------------------------------------------------------------------------------------


def short(value: Any) -> str:
    """A value's literal; one number for a list of equal ones."""
    if not isinstance(value, list):
        return literal(value)
    if value and value.count(value[0]) == len(value):
        return literal(value[0])
    return listed([literal(item) for item in value])


def unlike(part: Part, defaults: Mapping[str, Any]) -> list[str]:
    """``stride=2`` for each argument that is not the constructor's default."""
    return [
        f"{name}={short(part.arguments[name])}"
        for name, default in defaults.items()
        if short(part.arguments[name]) != short(default)
    ]


def unless(condition: bool, text: str) -> list[str]:
    """The text, where the condition does not hold."""
    return [] if condition else [text]


def affine(part: Part, name: str = "affine") -> list[str] | None:
    """``bias=False``, ``affine=False``; None for a bias alone, which no layer has."""
    if part.has("weight"):
        return unless(part.has("bias"), "bias=False")
    return None if part.has("bias") else [f"{name}=False"]
