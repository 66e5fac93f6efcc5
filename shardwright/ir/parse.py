"""Reads the text form of a graph (see `text`) back into an equal graph.

Errors name the line and the column.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, cast

import msgspec

from shardwright.errors import GraphError
from shardwright.ir.attributes import LAYOUTS, MEMORY_FORMATS
from shardwright.ir.dtypes import DTYPES
from shardwright.ir.graph import IRGraph
from shardwright.ir.structure import Arguments, Tree
from shardwright.ir.text import NO_SCOPE
from shardwright.ir.validate import validate
from shardwright.ir.values import SLOT, STORED_ROLES, Input, IRValue, Role, Scope, Source

_TOKEN = re.compile(
    r"""\s*(?:(?P<name>%(?:[\w.@/-]+|"(?:[^"\\]|\\.)*"))
    |(?P<string>"(?:[^"\\]|\\.)*")
    |(?P<number>-?(?:\d[\w.]*(?:[eE][+-]\d+)?)|-?inf|nan|\([^()]*j\))
    |(?P<word>[A-Za-z_][\w.]*)
    |(?P<mark>[\[\](){}:,=@!]))""",
    re.VERBOSE,
)
_WORDS: dict[str, Any] = {
    "None": None,
    "True": True,
    "False": False,
    "slot": SLOT,
    **{str(dtype): dtype for dtype in DTYPES.values()},
    **{str(item): item for item in (*LAYOUTS.values(), *MEMORY_FORMATS.values())},
}
_SOURCE = re.compile(r"  # (?P<file>.*):(?P<line>\d+)$")


def parse_graph(text: str) -> IRGraph:
    """The graph that a text describes, validated. Raises GraphError with line and column."""
    reader = _GraphReader()
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            reader.read(_Line(number, line))
    if reader.graph is None:
        raise GraphError("line 1: expected 'graph NAME', found nothing")
    validate(reader.graph)
    return reader.graph


class _Line:
    """One line, read token by token."""

    def __init__(self, number: int, text: str) -> None:
        self.number = number
        self.text = text
        self.at = 0

    def fail(self, message: str) -> GraphError:
        found = self.text[self.at : self.at + 20].strip() or "the end of the line"
        return GraphError(f"line {self.number}, column {self.at + 1}: {message}, found {found!r}")

    def take(self, *kinds: str, mark: str | None = None) -> str | None:
        """The next token if it is of one of these kinds, or this mark; else None."""
        match = _TOKEN.match(self.text, self.at)
        if match is None or match.lastgroup not in (kinds or ("mark",)):
            return None
        token = match[match.lastgroup]
        if mark is not None and token != mark:
            return None
        self.at = match.end()
        return token

    def need(self, what: str, *kinds: str, mark: str | None = None) -> str:
        token = self.take(*kinds, mark=mark)
        if token is None:
            raise self.fail(f"expected {what}")
        return token

    def rest(self) -> str:
        rest, self.at = self.text[self.at :].strip(), len(self.text)
        return rest

    def items(self, closing: str, read: Callable[[], Any]) -> list[Any]:
        """What ``read`` gives, separated by commas, up to the closing mark."""
        found: list[Any] = []
        while self.take(mark=closing) is None:
            if found:
                self.need(f"',' or {closing!r}", mark=",")
            found.append(read())
        return found


def _unquote(token: str) -> str:
    return cast(str, json.loads(token)) if token.startswith('"') else token


class _GraphReader:
    """Builds a graph line by line, in the order in which `text` writes it."""

    def __init__(self) -> None:
        self.graph: IRGraph | None = None
        self.by_name: dict[str, int] = {}
        self.scopes: tuple[Scope, ...] = ()

    def read(self, line: _Line) -> None:
        if self.graph is None:
            if line.take("word") != "graph":
                raise line.fail("expected 'graph NAME'")
            self.graph = IRGraph(_unquote(line.rest()))
            return
        start = line.at
        word = line.take("word")
        readers: dict[str, Callable[[IRGraph, _Line], None]] = {
            "input": self._input,
            "in": self._scopes,
            "return": self._return,
            "update": self._update,
            "arguments": self._arguments,
            "result": self._result,
        }
        if word in readers:
            readers[word](self.graph, line)
        elif word in STORED_ROLES:
            self._stored(self.graph, line, word)
        else:
            line.at = start
            self._node(self.graph, line)

    def _value(self, graph: IRGraph, line: _Line, role: Role) -> IRValue:
        """``%name!: f32[2, 3]{3, 1}@cuda:0``."""
        name = _unquote(line.need("a value's name", "name")[1:])
        if name in self.by_name:
            raise line.fail(f"the value %{name} is declared twice")
        if line.take(mark="!"):
            role = "output"
        line.need("':'", mark=":")
        dtype = line.need("a dtype", "word")
        line.need("'['", mark="[")
        shape = line.items("]", lambda: int(line.need("a size", "number")))
        strides = None
        if line.take(mark="{"):
            strides = line.items("}", lambda: int(line.need("a stride", "number")))
        device = self._device(line) if line.take(mark="@") else "cpu"
        value = graph.new_value(name, shape, dtype, role=role, strides=strides, device=device)
        self.by_name[name] = value.id
        return value

    def _device(self, line: _Line) -> str:
        kind = line.need("a device", "word")
        start = line.at
        if line.take(mark=":") and (index := line.take("number")):
            return f"{kind}:{index}"
        line.at = start
        return kind

    def _reference(self, line: _Line) -> int:
        name = _unquote(line.need("a value's name", "name")[1:])
        if name not in self.by_name:
            raise line.fail(f"no value named %{name} stands before this")
        return self.by_name[name]

    def _input(self, graph: IRGraph, line: _Line) -> None:
        graph.inputs.append(self._value(graph, line, "input").id)

    def _stored(self, graph: IRGraph, line: _Line, role: str) -> None:
        value = self._value(graph, line, cast(Role, role))
        line.need("'='", mark="=")
        names = [json.loads(line.need("a quoted name", "string"))]
        while line.take(mark=","):
            names.append(json.loads(line.need("a quoted name", "string")))
        value.names = tuple(names)
        if line.take(mark="["):
            value.placements = tuple(line.items("]", lambda: self._range(line)))

    def _range(self, line: _Line) -> tuple[int, int]:
        start = int(line.need("the start of a range", "number"))
        line.need("':'", mark=":")
        return start, int(line.need("the end of a range", "number"))

    def _scopes(self, graph: IRGraph, line: _Line) -> None:
        rest = line.rest()
        parts = [] if rest == NO_SCOPE else rest.split(" > ")
        self.scopes = tuple(Scope(*part.split(":", 1)) for part in parts)

    def _node(self, graph: IRGraph, line: _Line) -> None:
        source = _SOURCE.search(line.text)
        if source is not None:
            line.text = line.text[: source.start()]
        node_id = graph.fresh_id()
        outputs: list[int] = []
        while line.text[line.at :].lstrip().startswith("%"):
            outputs.append(self._value(graph, line, "tmp").id)
            if line.take(mark="="):
                break
            line.need("',' or '='", mark=",")
        op = line.need("an operator's name", "word")
        line.need("'('", mark="(")
        inputs: list[int] = []
        attrs: dict[str, Any] = {}
        line.items(")", lambda: self._argument(line, inputs, attrs))
        graph.emit(
            op,
            inputs,
            outputs,
            attrs,
            scopes=self.scopes,
            source=Source(source["file"], int(source["line"])) if source else None,
            node_id=node_id,
        )

    def _argument(self, line: _Line, inputs: list[int], attrs: dict[str, Any]) -> None:
        if (key := line.take("word")) is None:
            inputs.append(self._reference(line))
        else:
            line.need("'='", mark="=")
            attrs[key] = self._attribute(line, inputs)

    def _attribute(self, line: _Line, inputs: list[int]) -> Any:
        if line.take(mark="["):
            return line.items("]", lambda: self._attribute(line, inputs))
        if (text := line.take("string")) is not None:
            return json.loads(text)
        if (word := line.take("number")) is not None:
            return self._number(line, word)
        if line.text[line.at :].lstrip().startswith("%"):
            inputs.append(self._reference(line))
            return Input(len(inputs) - 1)
        word = line.need("an attribute's value", "word")
        if word not in _WORDS:
            raise line.fail(f"unknown value {word!r} before this")
        return _WORDS[word]

    def _number(self, line: _Line, word: str) -> int | float | complex:
        for read in (int, float, complex):
            try:
                return read(word)
            except ValueError:
                continue
        raise line.fail(f"{word!r} before this is not a number")

    def _return(self, graph: IRGraph, line: _Line) -> None:
        while line.text[line.at :].strip():
            graph.outputs.append(self._reference(line))
            line.take(mark=",")

    def _update(self, graph: IRGraph, line: _Line) -> None:
        old = self._reference(line)
        line.need("'='", mark="=")
        graph.updates[old] = self._reference(line)

    def _arguments(self, graph: IRGraph, line: _Line) -> None:
        graph.in_structure = _decode(line, Arguments)

    def _result(self, graph: IRGraph, line: _Line) -> None:
        graph.out_structure = cast(Tree, _decode(line, cast(Any, Tree)))


def _decode(line: _Line, kind: type[Any]) -> Any:
    at = line.at
    try:
        return msgspec.json.decode(line.rest().encode(), type=kind)
    except msgspec.DecodeError as error:
        line.at = at
        raise line.fail(f"the structure does not read ({error})") from None
