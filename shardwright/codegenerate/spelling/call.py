"""One operator call as a row of the tables sees it.

Comes in: a node and the expressions of its operands. Goes out: its arguments by the names of the
operator's schema, each an attribute, an `Operand`, or a list of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardwright.codegenerate.expression import Expression
from shardwright.ir import SLOT, IRGraph, IRNode, IRValue, resolve
from shardwright.ir.operators import Parameter, named_arguments, signature


@dataclass(frozen=True, slots=True)
class Mode:
    """What is known of the place that a call is written for.

    training
        Whether the graph was captured in training mode.
    in_module
        Whether ``self.training`` is there to be read.
    device
        An expression for the device, as ``input_ids.device``, where no operand's own can be read.
    """

    training: bool
    in_module: bool = True
    device: str | None = None


class Operand(NamedTuple):
    """A tensor among the arguments: how it is written, and what it is."""

    expression: Expression
    value: IRValue


def slots(op: str) -> tuple[Parameter, ...]:
    """The arguments of an overload's schema, in order."""
    return signature(resolve(op)).parameters


@dataclass(frozen=True, slots=True)
class Call:
    """One call: ``arguments`` by the schema's names, the values that it makes, and the mode."""

    op: str
    arguments: Mapping[str, Any]
    outputs: tuple[IRValue, ...]
    mode: Mode

    @classmethod
    def of(
        cls, graph: IRGraph, node: IRNode, operands: Mapping[int, Expression], mode: Mode
    ) -> Call:
        """A node's call, with ``operands`` for the values that it reads."""
        inputs = [Operand(operands[value_id], graph.values[value_id]) for value_id in node.inputs]
        arguments = named_arguments(resolve(node.op), inputs, node.attrs, SLOT)
        return cls(node.op, arguments, tuple(graph.values[i] for i in node.outputs), mode)

    def operand(self, name: str) -> Operand:
        """The argument ``name``, which is a tensor."""
        found = self.arguments[name]
        assert isinstance(found, Operand), f"{self.op}: {name} is {found!r}"
        return found

    def has(self, name: str) -> bool:
        """Whether the argument ``name`` is a tensor."""
        return isinstance(self.arguments[name], Operand)

    @property
    def device(self) -> str | None:
        """An expression for the device that the call names, None where there is none to read.

        It is an operand's, where reading that computes nothing.
        """
        for argument in self.arguments.values():
            if isinstance(argument, Operand) and _NAMED.fullmatch(argument.expression.text):
                return f"{argument.expression.text}.device"
        return self.mode.device

    def flag(self, *, training: bool) -> str:
        """A flag of training: ``self.training`` where it is what the mode was."""
        follows = self.mode.in_module and training == self.mode.training
        return "self.training" if follows else str(training)


_NAMED = re.compile(r'[A-Za-z_]\w*(\.\w+|\["[^"]*"\]|\[\d+\])*')

Row = Callable[[Call], Expression | None]
"""A row of the tables; None where what it would write is captured as something else."""
