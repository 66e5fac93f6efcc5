"""The text form of a graph: a declaration a line for inputs and stored values, a node a line.

    graph mlp
    input %x: f32[4, 8]
    param %fc.weight: f32[16, 8] = "fc.weight"
    state %fc.weight.step: f32[] = "optimizer.fc.weight.step" zeros
    in fc:torch.nn.modules.linear.Linear
      %linear: f32[4, 16] = aten.linear.default(%x, %fc.weight, bias=None)  # mlp.py:12
    return %linear
    arguments {...}
    result {...}

Where a call returns no tensor is ``_``: ``%dx: f32[4, 8], _, _ = …_backward.default(…)``.
An ``in`` line says which modules are around the nodes after it, outermost first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from shardwright.ir.operators import listed_inputs
from shardwright.ir.tensor_meta import tensor_text
from shardwright.ir.values import SLOT, Input, IRNode, IRValue, Scope

if TYPE_CHECKING:
    from shardwright.ir.graph import IRGraph

PLAIN_NAME = re.compile(r"[\w.@/-]+")
PLAIN_CLASS = re.compile(r"[\w.<>-]+")
PLAIN_FILE = re.compile(r'[^\s"]([^\r\n]*\S)?')
NO_SCOPE = "-"
ABSENT = "_"


def format_graph(graph: IRGraph) -> str:
    """The text of a graph."""
    return "\n".join(_lines(graph)) + "\n"


def _lines(graph: IRGraph) -> Iterator[str]:
    yield f"graph {format_name(graph.name)}"
    for value_id in graph.inputs:
        yield f"input {declare(graph.values[value_id])}"
    for value in graph.stored():
        yield f"{value.role} {declare(value)} = {_location(value)}"
    scopes: tuple[Scope, ...] = ()
    for node in graph.nodes:
        if node.scopes != scopes:
            scopes = node.scopes
            yield f"in {format_scopes(scopes)}"
        yield f"  {format_node(graph, node)}"
    yield f"return {_references(graph, graph.outputs)}".rstrip()
    for old, new in graph.updates.items():
        yield f"update {_references(graph, [old])} = {_references(graph, [new])}"
    if graph.in_structure is not None:
        yield f"arguments {msgspec.json.encode(graph.in_structure).decode()}"
    if graph.out_structure is not None:
        yield f"result {msgspec.json.encode(graph.out_structure).decode()}"


def format_node(graph: IRGraph, node: IRNode) -> str:
    """``%y: f32[4, 16] = aten.linear.default(%x, %w, bias=None)  # mlp.py:12``."""
    made = ", ".join(
        ABSENT if value_id is None else declare(graph.values[value_id]) for value_id in node.results
    )
    listed = set(listed_inputs(list(node.attrs.values())))
    names = [f"%{format_name(graph.values[value_id].name)}" for value_id in node.inputs]
    parts = [name for i, name in enumerate(names) if i not in listed]
    parts += [f"{key}={format_attribute(value, names)}" for key, value in node.attrs.items()]
    return f"{made}{' = ' if made else ''}{node.op}({', '.join(parts)}){_source(node)}"


def _source(node: IRNode) -> str:
    if node.source is None:
        return ""
    return f"  # {_quoted_unless(PLAIN_FILE, node.source.file)}:{node.source.line}"


def declare(value: IRValue) -> str:
    """``%name: f32[2, 3]``, with strides in braces and a device after @ where they matter."""
    strides = "" if value.strides is None else "{" + ", ".join(map(str, value.strides)) + "}"
    device = "" if value.device == "cpu" else f"@{value.device}"
    role = "!" if value.role == "output" else ""
    kind = tensor_text(value.dtype, value.shape)
    return f"%{format_name(value.name)}{role}: {kind}{strides}{device}"


def format_name(name: str) -> str:
    """A name as it is, or in quotes where it holds other than word characters and ``.@/-``."""
    return _quoted_unless(PLAIN_NAME, name)


def _quoted_unless(plain: re.Pattern[str], text: str) -> str:
    return text if plain.fullmatch(text) else json.dumps(text)


def format_scopes(scopes: Sequence[Scope]) -> str:
    """``layers.0:Block > layers.0.mlp:MLP``, or ``-`` for the root."""
    parts = (f"{format_name(path)}:{_quoted_unless(PLAIN_CLASS, cls)}" for path, cls in scopes)
    return " > ".join(parts) or NO_SCOPE


def format_attribute(value: Any, inputs: Sequence[str]) -> str:
    """An attribute as a Python expression, with names for inputs and ``slot`` for the device."""
    if isinstance(value, Input):
        return inputs[value.index]
    if isinstance(value, list):
        return f"[{', '.join(format_attribute(item, inputs) for item in value)}]"
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, complex):
        return f"complex({value.real!r}, {value.imag!r})"
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value)
    return "slot" if value is SLOT else repr(value)


def _location(value: IRValue) -> str:
    names = ", ".join(json.dumps(name) for name in value.names)
    if value.placements is not None:
        names += f" [{', '.join(f'{start}:{stop}' for start, stop in value.placements)}]"
    return f"{names} {value.init}" if value.init else names


def _references(graph: IRGraph, value_ids: Sequence[int]) -> str:
    return ", ".join(f"%{format_name(graph.values[value_id].name)}" for value_id in value_ids)
