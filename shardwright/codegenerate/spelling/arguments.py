"""What stands between the brackets of a call.

Comes in: a call, and the style in which Python takes its arguments. Goes out: their texts. What
always holds: an argument that has the value that Python gives it anyway is left out; what is
required stands by place, and so do optional tensors that follow it without a gap; all else is a
keyword.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwright.codegenerate.expression import Expression
from shardwright.codegenerate.spelling.call import Call, Operand, slots
from shardwright.codegenerate.spelling.literals import listed, literal
from shardwright.ir import SLOT
from shardwright.ir.operators import Parameter

Words = Mapping[int, str]
_PYTHON_DEFAULTS: Mapping[str, Any] = {"pin_memory": False}
"""What torch's Python functions pass where the schema's default is None. None has no word."""

ALWAYS: Any = object()
"""The default of an argument that is always written: without it Python calls another overload."""


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
    words
        Python's words for an argument's numbers.
    rename
        Python's names for the schema's.
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
    words: Mapping[str, Words] = field(default_factory=dict)
    rename: Mapping[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    brackets: bool = False
    by_schema: bool = False

    def slots(self, op: str) -> Iterator[Parameter]:
        """The schema's arguments in Python's order, without those that Python does not take."""
        known = {slot.name: slot for slot in slots(op)}
        for name in self.order or known:
            if name not in self.settings:
                yield known[name]


PLAIN = Style()
IN_BRACKETS = Style(brackets=True)


def arguments(call: Call, style: Style) -> list[str] | None:
    """The texts between the brackets of a call; None where Python passes something else."""
    parts: list[str] = []
    by_place = True
    for place, slot in enumerate(style.slots(call.op)):
        value = call.arguments[slot.name]
        if _is_left_out(call, slot, value, style):
            by_place = False
            continue
        stands = _stands_by_place(slot, value, style, place)
        by_place = by_place and not slot.keyword_only and stands
        if slot.name == style.spread and by_place and value:
            parts += [expression_of(item).text for item in value]
            continue
        text = _argument(call, slot, value, style)
        if text is None:
            return None
        parts.append(text if by_place else f"{style.rename.get(slot.name, slot.name)}={text}")
    return parts


def _is_left_out(call: Call, slot: Parameter, value: Any, style: Style) -> bool:
    """Whether Python passes the value where nothing is written."""
    if slot.name in style.flags and call.mode.in_module and value == call.mode.training:
        return False
    if value is SLOT:
        return call.device is None
    if slot.name in style.defaults:
        return _is_same(value, style.defaults[slot.name])
    if slot.name in _PYTHON_DEFAULTS and not style.by_schema:
        return _is_same(value, _PYTHON_DEFAULTS[slot.name])
    return not slot.required and _is_same(value, slot.default)


def _is_same(value: Any, default: Any) -> bool:
    return isinstance(value, bool) == isinstance(default, bool) and bool(value == default)


def _stands_by_place(slot: Parameter, value: Any, style: Style, place: int) -> bool:
    if style.front is not None:
        return place < style.front
    optional = slot.name in style.defaults or not slot.required
    return not optional or isinstance(value, Operand)


def _argument(call: Call, slot: Parameter, value: Any, style: Style) -> str | None:
    """One argument's text; None where Python has no word for it."""
    if slot.name in style.flags:
        return call.flag(training=value)
    if slot.name in style.words:
        word = style.words[slot.name].get(value)
        return None if word is None else literal(word).text
    if value is SLOT:
        return call.device
    if value is None and slot.name in _PYTHON_DEFAULTS and not style.by_schema:
        return None
    if isinstance(value, list):
        return _list(slot, value, style)
    return expression_of(value).text


def _list(slot: Parameter, value: list[Any], style: Style) -> str:
    """A list; one number where Python spreads that to the list."""
    tensors = any(isinstance(item, Operand) for item in value)
    even = bool(value) and all(_is_same(item, value[0]) for item in value)
    if even and not tensors and len(value) == slot.length and not style.by_schema:
        return expression_of(value[0]).text
    texts = [
        listed([expression_of(each).text for each in item])
        if isinstance(item, list)
        else expression_of(item).text
        for item in value
    ]
    return listed(texts, brackets=style.brackets or tensors)


def expression_of(value: Any) -> Expression:
    """The expression of an operand or of a literal."""
    return value.expression if isinstance(value, Operand) else literal(value)
