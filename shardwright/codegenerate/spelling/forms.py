"""The forms that an operator's call can take in Python, and what stands between its brackets.

    function("torch.cat")             torch.cat([x, y], dim=1)
    method("view", spread="size")     x.view(2, -1)
    infix("+")                        x + y
    attribute("mT")                   x.mT

An argument that has the value that Python gives it anyway is left out; what is required stands by
place, and so do optional tensors that follow it without a gap; all else is a keyword. Expressions
are texts; an operand that stands beside an operator or a dot is put in parentheses, and `spell`
drops those that are not needed.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from shardwright.errors import GraphError
from shardwright.ir import SLOT, IRGraph, IRNode, IRValue, resolve
from shardwright.ir.operators import SchemaArgument, named_arguments, signature

_EXTREMES = {
    getattr(torch.finfo(dtype), end): f"torch.finfo({dtype}).{end}"
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    for end in ("min", "max")
}


def literal(value: Any) -> str:
    """One value that is no list. Raises GraphError for what has no literal."""
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, complex):
        return f"complex({literal(value.real)}, {literal(value.imag)})"
    if isinstance(value, float):
        return _EXTREMES.get(value, repr(value)) if math.isfinite(value) else f'float("{value}")'
    if value is None or isinstance(
        value, bool | int | torch.dtype | torch.layout | torch.memory_format
    ):
        return str(value)
    raise GraphError(f"{value!r} has no form in Python code")


def quoted(text: str) -> str:
    """Any text as a string literal in double quotes, all of it printable."""
    return "".join(_printable(sign) for sign in json.dumps(text, ensure_ascii=False))


def _printable(sign: str) -> str:
    if sign.isprintable():
        return sign
    return f"\\u{ord(sign):04x}" if ord(sign) <= 0xFFFF else f"\\U{ord(sign):08x}"


def described(text: str) -> str:
    """Text as it may stand in a docstring or a comment, on one line."""
    plain = "".join(sign if sign.isprintable() else "?" for sign in text)
    return plain.replace("\\", "\\\\").replace('"', "'")


def listed(texts: Sequence[str], *, brackets: bool = False) -> str:
    """A list of texts: a tuple, or in brackets."""
    if brackets:
        return f"[{', '.join(texts)}]"
    return f"({texts[0]},)" if len(texts) == 1 else f"({', '.join(texts)})"


@lru_cache(maxsize=1 << 12)
def without_parentheses(text: str) -> str:
    """An expression without those that it does not need; equal layers have equal expressions."""
    return ast.unparse(ast.parse(text, mode="eval"))


# --- calls ----------------------------------------------------------------------------------------


class Mode(NamedTuple):
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

    text: str
    value: IRValue


@dataclass(frozen=True, slots=True)
class SpelledCall:
    """One call: ``arguments`` by the schema's names, each an attribute, an `Operand`, or a list."""

    op: str
    arguments: Mapping[str, Any]
    mode: Mode

    @classmethod
    def of(
        cls, graph: IRGraph, node: IRNode, operands: Mapping[int, str], mode: Mode
    ) -> SpelledCall:
        """A node's call, with ``operands`` for the values that it reads."""
        inputs = [Operand(operands[value_id], graph.values[value_id]) for value_id in node.inputs]
        return cls(node.op, named_arguments(resolve(node.op), inputs, node.attrs, SLOT), mode)

    def operand(self, name: str) -> Operand:
        """The argument ``name``, which is a tensor."""
        found = self.arguments[name]
        assert isinstance(found, Operand), f"{self.op}: {name} is {found!r}"
        return found

    def text(self, name: str) -> str:
        """How the argument ``name`` is written by itself."""
        return text_of(self.arguments[name])

    @property
    def device(self) -> str | None:
        """An expression for the device that the call names, None where there is none to read.

        It is an operand's, where reading that computes nothing.
        """
        for argument in self.arguments.values():
            if isinstance(argument, Operand) and _NAMED.fullmatch(argument.text):
                return f"{argument.text}.device"
        return self.mode.device


_NAMED = re.compile(r"[A-Za-z_]\w*(\.\w+|\[\"[^\"]*\"\]|\['[^']*'\]|\[\d+\])*")

Row = Callable[[SpelledCall], str | None]
"""How one operator is written; None where Python would call another overload."""

ALWAYS: Any = object()
"""The default of an argument that is always written: without it Python calls another overload."""
_PYTHON_DEFAULTS: Mapping[str, Any] = {"pin_memory": False}
"""What torch's Python functions pass where the schema's default is None. None has no word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """How the arguments of a call are written.

    order
        The schema's names in the order in which Python takes them; the schema's where empty.
    front
        How many stand by place, required or not; None where the usual rule holds.
    spread
        A list whose items are arguments of their own.
    defaults
        What Python passes for an argument that is left out, where that is not the schema's default.
    settings
        Arguments that Python does not take but reads from torch's settings.
    words, rename
        Python's words for an argument's numbers, and its names for the schema's.
    flags
        Arguments that say whether the model is in training mode.
    brackets
        Whether lists of numbers stand in brackets; else they are tuples.
    by_schema
        Whether an overload is called, which takes what its schema says: no number for a list.
    """

    order: tuple[str, ...] = ()
    front: int | None = None
    spread: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    settings: tuple[str, ...] = ()
    words: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    rename: Mapping[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    brackets: bool = False
    by_schema: bool = False

    def parameters(self, op: str) -> Iterator[SchemaArgument]:
        """The schema's parameters in Python's order, without those that Python does not take."""
        known = {parameter.name: parameter for parameter in parameters(op)}
        for name in self.order or known:
            if name not in self.settings:
                yield known[name]


def parameters(op: str) -> tuple[SchemaArgument, ...]:
    """The parameters of an overload's schema, in order."""
    return signature(resolve(op)).parameters


# --- arguments ----------------------------------------------------------------------------------


def arguments(call: SpelledCall, style: Style) -> list[str] | None:
    """The texts between the brackets of a call; None where Python passes something else."""
    parts: list[str] = []
    by_place = True
    for place, parameter in enumerate(style.parameters(call.op)):
        value = call.arguments[parameter.name]
        if _is_left_out(call, parameter, value, style):
            by_place = False
            continue
        stands = _stands_by_place(parameter, value, style, place)
        by_place = by_place and not parameter.keyword_only and stands
        if parameter.name == style.spread and by_place and value:
            parts += map(text_of, value)
            continue
        text = _argument(call, parameter, value, style)
        if text is None:
            return None
        name = style.rename.get(parameter.name, parameter.name)
        parts.append(text if by_place else f"{name}={text}")
    return parts


def _is_left_out(call: SpelledCall, parameter: SchemaArgument, value: Any, style: Style) -> bool:
    """Whether Python passes the value where nothing is written."""
    name = parameter.name
    if name in style.flags and call.mode.in_module and value == call.mode.training:
        return False
    if value is SLOT:
        return call.device is None
    if name in style.defaults:
        return _is_same(value, style.defaults[name])
    if name in _PYTHON_DEFAULTS and not style.by_schema:
        return _is_same(value, _PYTHON_DEFAULTS[name])
    return not parameter.required and _is_same(value, parameter.default)


def _is_same(value: Any, default: Any) -> bool:
    return isinstance(value, bool) == isinstance(default, bool) and bool(value == default)


def _stands_by_place(parameter: SchemaArgument, value: Any, style: Style, place: int) -> bool:
    if style.front is not None:
        return place < style.front
    optional = parameter.name in style.defaults or not parameter.required
    return not optional or isinstance(value, Operand)


def _argument(call: SpelledCall, parameter: SchemaArgument, value: Any, style: Style) -> str | None:
    """One argument's text; None where Python has no word for it."""
    name = parameter.name
    if name in style.flags:
        follows = call.mode.in_module and value == call.mode.training
        return "self.training" if follows else str(value)
    if name in style.words:
        word = style.words[name].get(value)
        return None if word is None else literal(word)
    if value is SLOT:
        return call.device
    if value is None and name in _PYTHON_DEFAULTS and not style.by_schema:
        return None
    if isinstance(value, list):
        return _list(parameter, value, style)
    return text_of(value)


def _list(parameter: SchemaArgument, value: list[Any], style: Style) -> str:
    """A list; one number where Python spreads that to the list."""
    tensors = any(isinstance(item, Operand) for item in value)
    even = bool(value) and all(_is_same(item, value[0]) for item in value)
    if even and not tensors and len(value) == parameter.length and not style.by_schema:
        return text_of(value[0])
    return listed([*map(text_of, value)], brackets=style.brackets or tensors)


def text_of(value: Any) -> str:
    """An operand, a literal, or a list of literals."""
    if isinstance(value, Operand):
        return value.text
    return listed([*map(text_of, value)]) if isinstance(value, list) else literal(value)


# --- forms --------------------------------------------------------------------------------------


def words(text: str) -> list[str]:
    """The names in a text, for tables of many."""
    return text.split()


def function(name: str, style: Style | None = None, *, also: tuple[str, ...] = ()) -> Row:
    """``name(x, y, key=value)``; ``also`` are arguments that no parameter stands for."""

    def row(call: SpelledCall) -> str | None:
        parts = arguments(call, style or Style())
        return None if parts is None else f"{name}({', '.join([*parts, *also])})"

    return row


def method(name: str, style: Style | None = None) -> Row:
    """``x.name(y, key=value)``."""

    def row(call: SpelledCall) -> str | None:
        parts = arguments(call, style or Style())
        return None if parts is None else f"({parts[0]}).{name}({', '.join(parts[1:])})"

    return row


def infix(symbol: str, *, reflected: bool = False) -> Row:
    """``x + y``, or ``y - x`` where reflected; None where other arguments than two are given.

    Nor is anything compared with True, which linters take for a mistake.
    """

    def row(call: SpelledCall) -> str | None:
        left, right, *others = parameters(call.op)
        has_truth = any(isinstance(value, bool) for value in call.arguments.values())
        if has_truth or any(call.arguments[other.name] != other.default for other in others):
            return None
        first, second = (right, left) if reflected else (left, right)
        return f"({call.text(first.name)}) {symbol} ({call.text(second.name)})"

    return row


def prefix(symbol: str) -> Row:
    """``-x``."""
    return lambda call: f"{symbol}({call.text(parameters(call.op)[0].name)})"


def attribute(name: str) -> Row:
    """``x.name``."""
    return lambda call: f"({call.text(parameters(call.op)[0].name)}).{name}"


def first_of(*rows: Row) -> Row:
    """The first form that captures back."""
    return lambda call: next((found for row in rows if (found := row(call)) is not None), None)
