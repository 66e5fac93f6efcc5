"""Reads the text form of a graph (see `text`) back into an equal graph.

Errors name the line and the column.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar, cast

import msgspec

from shardwright.errors import GraphError
from shardwright.ir.attributes import LAYOUTS, MEMORY_FORMATS
from shardwright.ir.dtypes import DTYPES
from shardwright.ir.graph import IRGraph
from shardwright.ir.operators import is_marker, resolve
from shardwright.ir.structure import Arguments, Tree
from shardwright.ir.text import ABSENT, NO_SCOPE, PLAIN_CLASS, PLAIN_FILE, PLAIN_NAME
from shardwright.ir.validate import validate
from shardwright.ir.values import SLOT, STORED_ROLES, Input, IRValue, Role, Scope, Source

T = TypeVar("T")

_STRING = r'"(?:[^"\\]|\\.)*"'
_TOKEN = re.compile(
    rf"""\s*(?:(?P<name>%(?:{PLAIN_NAME.pattern}|{_STRING}))
    |(?P<string>{_STRING})
    |(?P<number>-?(?:\d+(?:\.\d+)?(?:[eE][+-]?\d+)?\b|inf\b))
    |(?P<word>[A-Za-z_][\w.]*)
    |(?P<mark>[\[\](){{}}:,=@!]))""",
    re.VERBOSE,
)
_NAME = re.compile(rf"\s*(?P<name>{PLAIN_NAME.pattern}|{_STRING})")
_SCOPE = re.compile(
    rf"\s*(?P<path>{PLAIN_NAME.pattern}|{_STRING}):(?P<cls>{_STRING}|{PLAIN_CLASS.pattern})"
)
_ABSENT = re.compile(rf"\s*{ABSENT}(?=\s*[,=])")
_SOURCE = re.compile(rf"\s*# (?P<file>{_STRING}|{PLAIN_FILE.pattern}):(?P<line>\d+)")
_WORDS: dict[str, Any] = {
    "None": None,
    "True": True,
    "False": False,
    "nan": math.nan,
    "slot": SLOT,
    **{str(dtype): dtype for dtype in DTYPES.values()},
    **{str(item): item for item in (*LAYOUTS.values(), *MEMORY_FORMATS.values())},
}


def parse_graph(text: str) -> IRGraph:
    """The graph that a text describes, validated. Raises GraphError with line and column."""
    reader = _GraphReader()
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            reader.read(_Line(number, line))
    if reader.graph is None:
        raise GraphError("line 1, column 1: expected 'graph NAME', found an empty text")
    validate(reader.graph)
    return reader.graph


class _Line:
    """One line, read token by token."""

    def __init__(self, number: int, text: str) -> None:
        self.number = number
        self.text = text
        self.at = len(text) - len(text.lstrip())

    def fail(self, message: str, at: int | None = None) -> NoReturn:
        """Raise with the place: where the reading stands, or ``at``."""
        at = self.at if at is None else at
        at += len(self.text[at:]) - len(self.text[at:].lstrip())
        found = self.text[at : at + 20].strip()
        raise GraphError(
            f"line {self.number}, column {at + 1}: {message}, "
            f"found {repr(found) if found else 'the end of the line'}"
        )

    def next_is(self, start: str) -> bool:
        return self.text[self.at :].lstrip().startswith(start)

    def match(self, pattern: re.Pattern[str], what: str) -> re.Match[str]:
        match = pattern.match(self.text, self.at)
        if match is None:
            self.fail(f"expected {what}")
        self.at = match.end()
        return match

    def take(self, kind: str = "mark", *, mark: str | None = None) -> str | None:
        """The next token if it is of this kind, or this mark; else None."""
        match = _TOKEN.match(self.text, self.at)
        if match is None or match.lastgroup != kind or mark not in (None, match[kind]):
            return None
        self.at = match.end()
        return match[kind]

    def need(self, what: str, kind: str = "mark", *, mark: str | None = None) -> str:
        token = self.take(kind, mark=mark)
        if token is None:
            self.fail(f"expected {what}")
        return token

    def mark(self, mark: str) -> None:
        self.need(f"'{mark}'", mark=mark)

    def integer(self, what: str) -> int:
        start = self.at
        token = self.need(what, "number")
        if not token.removeprefix("-").isdecimal():
            self.fail(f"expected {what}, an integer", start)
        return int(token)

    def unquoted(self, token: str, start: int) -> str:
        """A name or string without its quotes; ``start`` is where it stands."""
        if not token.startswith('"'):
            return token
        try:
            return cast(str, json.loads(token))
        except json.JSONDecodeError as error:
            self.fail(f"the string does not read ({error.msg})", start)

    def string(self, what: str) -> str:
        start = self.at
        return self.unquoted(self.need(what, "string"), start)

    def items(self, closing: str, read: Callable[[], T]) -> list[T]:
        """What ``read`` gives, separated by commas, up to the closing mark."""
        found: list[T] = []
        while self.take(mark=closing) is None:
            if found:
                self.need(f"',' or '{closing}'", mark=",")
            found.append(read())
        return found

    def end(self) -> None:
        if self.text[self.at :].strip():
            self.fail("expected the end of the line")


class _GraphReader:
    """Builds a graph line by line, in the order in which `text` writes it."""

    def __init__(self) -> None:
        self.graph: IRGraph | None = None
        self.by_name: dict[str, int] = {}
        self.scopes: tuple[Scope, ...] = ()
        self.readers: dict[str, Callable[[IRGraph, _Line], None]] = {
            "input": self._input,
            **{role: self._stored(role) for role in STORED_ROLES},
            "in": self._in,
            "return": self._return,
            "update": self._update,
            "arguments": self._arguments,
            "result": self._result,
        }

    def read(self, line: _Line) -> None:
        start = line.at
        word = line.take("word")
        if self.graph is None:
            if word != "graph":
                line.fail("expected 'graph NAME'", start)
            match = line.match(_NAME, "the graph's name")
            self.graph = IRGraph(line.unquoted(match["name"], match.start("name")))
        elif word in self.readers:
            self.readers[word](self.graph, line)
        else:
            line.at = start
            self._node(self.graph, line)
        line.end()

    # --- values -----------------------------------------------------------------------------

    def _value(self, graph: IRGraph, line: _Line, role: Role) -> IRValue:
        """``%name!: f32[2, 3]{3, 1}@cuda:0``."""
        start = line.at
        name = self._name(line)
        if name in self.by_name:
            line.fail(f"the value %{name} is declared twice", start)
        if line.take(mark="!"):
            role = "output"
        line.mark(":")
        dtype = self._dtype(line)
        line.mark("[")
        shape = line.items("]", lambda: line.integer("a size"))
        strides = None
        if line.take(mark="{"):
            start = line.at
            strides = line.items("}", lambda: line.integer("a stride"))
            if len(strides) != len(shape):
                line.fail(f"expected {len(shape)} strides, as many as sizes", start)
        device = self._device(line) if line.take(mark="@") else "cpu"
        value = graph.new_value(name, shape, dtype, role=role, strides=strides, device=device)
        self.by_name[name] = value.id
        return value

    def _name(self, line: _Line) -> str:
        start = line.at
        return line.unquoted(line.need("a value's name", "name")[1:], start)

    def _dtype(self, line: _Line) -> str:
        start = line.at
        dtype = line.need("a dtype", "word")
        if dtype not in DTYPES:
            line.fail(f"expected one of the dtypes {', '.join(DTYPES)}", start)
        return dtype

    def _device(self, line: _Line) -> str:
        kind = line.need("a device", "word")
        start = line.at
        if line.take(mark=":") and (index := line.take("number")):
            return f"{kind}:{index}"
        line.at = start
        return kind

    def _reference(self, line: _Line) -> int:
        start = line.at
        name = self._name(line)
        if name not in self.by_name:
            line.fail(f"no value named %{name} stands before this", start)
        return self.by_name[name]

    def _input(self, graph: IRGraph, line: _Line) -> None:
        graph.inputs.append(self._value(graph, line, "input").id)

    def _stored(self, role: Role) -> Callable[[IRGraph, _Line], None]:
        def read(graph: IRGraph, line: _Line) -> None:
            value = self._value(graph, line, role)
            line.mark("=")
            names = [line.string("a quoted name")]
            while line.take(mark=","):
                names.append(line.string("a quoted name"))
            value.names = tuple(names)
            if line.take(mark="["):
                value.placements = tuple(line.items("]", lambda: self._range(line)))
            start = line.at
            if line.take("word") == "zeros":
                value.init = "zeros"
            else:
                line.at = start

        return read

    def _range(self, line: _Line) -> tuple[int, int]:
        start = line.integer("the start of a range")
        line.mark(":")
        return start, line.integer("the end of a range")

    # --- nodes ------------------------------------------------------------------------------

    def _in(self, graph: IRGraph, line: _Line) -> None:
        if line.text[line.at :].strip() == NO_SCOPE:
            self.scopes, line.at = (), len(line.text)
            return
        scopes = [self._scope(line)]
        while line.next_is(">"):
            line.at = line.text.index(">", line.at) + 1
            scopes.append(self._scope(line))
        self.scopes = tuple(scopes)

    def _scope(self, line: _Line) -> Scope:
        match = line.match(_SCOPE, "a module's path and class, PATH:CLASS")
        return Scope(*(line.unquoted(match[part], match.start(part)) for part in ("path", "cls")))

    def _node(self, graph: IRGraph, line: _Line) -> None:
        node_id = graph.fresh_id()
        outputs: list[int | None] = []
        while line.next_is("%") or _ABSENT.match(line.text, line.at):
            outputs.append(self._result_of_call(graph, line))
            if line.take(mark="="):
                break
            line.need("',' or '='", mark=",")
        op = self._operator(line)
        line.mark("(")
        inputs: list[int] = []
        attrs: dict[str, Any] = {}
        line.items(")", lambda: self._argument(line, inputs, attrs))
        source = self._source(line) if line.next_is("#") else None
        graph.emit(op, inputs, outputs, attrs, scopes=self.scopes, source=source, node_id=node_id)

    def _result_of_call(self, graph: IRGraph, line: _Line) -> int | None:
        """A value, or ``_`` where the call returns no tensor."""
        if line.next_is("%"):
            return self._value(graph, line, "tmp").id
        line.match(_ABSENT, ABSENT)
        return None

    def _operator(self, line: _Line) -> str:
        start = line.at
        op = line.need("an operator's name", "word")
        if not is_marker(op):
            try:
                resolve(op)
            except GraphError as error:
                line.fail(str(error), start)
        return op

    def _source(self, line: _Line) -> Source:
        match = line.match(_SOURCE, "a source line, '# FILE:LINE'")
        return Source(line.unquoted(match["file"], match.start("file")), int(match["line"]))

    def _argument(self, line: _Line, inputs: list[int], attrs: dict[str, Any]) -> None:
        start = line.at
        if (key := line.take("word")) is None:
            inputs.append(self._reference(line))
            return
        line.mark("=")
        if key in attrs:
            line.fail(f"the attribute {key} is given twice", start)
        attrs[key] = self._attribute(line, inputs)

    def _attribute(self, line: _Line, inputs: list[int]) -> Any:
        if line.take(mark="["):
            return line.items("]", lambda: self._attribute(line, inputs))
        if line.next_is('"'):
            return line.string("a string")
        if line.next_is("%"):
            inputs.append(self._reference(line))
            return Input(len(inputs) - 1)
        if (number := line.take("number")) is not None:
            return int(number) if number.removeprefix("-").isdecimal() else float(number)
        start = line.at
        word = line.need("an attribute's value", "word")
        if word == "complex":
            return self._complex(line)
        if word not in _WORDS:
            line.fail("expected an attribute's value", start)
        return _WORDS[word]

    def _complex(self, line: _Line) -> complex:
        start = line.at
        line.mark("(")
        parts = line.items(")", lambda: self._attribute(line, []))
        if len(parts) != 2 or not all(isinstance(part, (int, float)) for part in parts):
            line.fail("expected two numbers in parentheses", start)
        return complex(*parts)

    # --- ends -------------------------------------------------------------------------------

    def _return(self, graph: IRGraph, line: _Line) -> None:
        while line.next_is("%"):
            graph.outputs.append(self._reference(line))
            if line.take(mark=",") is None:
                break

    def _update(self, graph: IRGraph, line: _Line) -> None:
        old = self._reference(line)
        line.mark("=")
        graph.updates[old] = self._reference(line)

    def _arguments(self, graph: IRGraph, line: _Line) -> None:
        graph.in_structure = _decode(line, Arguments)

    def _result(self, graph: IRGraph, line: _Line) -> None:
        graph.out_structure = cast(Tree, _decode(line, cast(Any, Tree)))


def _decode(line: _Line, kind: type[Any]) -> Any:
    start, line.at = line.at, len(line.text)
    try:
        return msgspec.json.decode(line.text[start:], type=kind)
    except msgspec.DecodeError as error:
        line.fail(f"the structure does not read ({error})", start)
