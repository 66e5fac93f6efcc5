"""IRGraph: values and nodes, one node an operator call.

A graph is functional and flat: no operator in it writes to an input, none calls a subgraph, and
an in-place write of the program is a new value. `Builder` writes graphs; everything else reads
them. `validate` checks what holds of it: each value has at most one producer, is defined
before it is used, has a shape and a dtype, and knows its users.

A training step is a graph that holds markers beside operators: nodes whose ``op`` is a step of
training (`Backward`, `zero_grad`, `adamw_step`, …), which `building` expands. A marker reads and
makes values like any node, so that what depends on one follows from the edges alone.
"""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch
from torch import nn

from shardwright.errors import GraphError
from shardwright.ir.execute import run_graph
from shardwright.ir.operators import is_marker, is_random, listed_inputs
from shardwright.ir.structure import Arguments, Tree, leaves
from shardwright.ir.tensor_meta import TensorMeta, strides_or_none, tensor_text
from shardwright.ir.validate import validate
from shardwright.ir.values import (
    SLOT,
    STORED_ROLES,
    Init,
    Input,
    IRNode,
    IRValue,
    Role,
    Scope,
    Source,
)

T = TypeVar("T")


class NodeList(list[T]):
    """The nodes of a graph in execution order; ``graph.nodes()`` gives them as ``graph.nodes``."""

    def __call__(self) -> NodeList[T]:
        """The nodes themselves."""
        return self


class Captured(NamedTuple):
    """What a graph was captured from.

    A copy of the model with its tensors, None where it cannot be copied; the hash of the calls of
    torch that it made, and whether gradients were recorded.
    """

    model: nn.Module | None
    calls: int
    records: bool


@dataclass(slots=True, weakref_slot=True, repr=False)
class IRGraph:
    """Values and nodes in execution order.

    inputs
        Value ids, in the order of the leaves of ``in_structure``.
    outputs
        Value ids, in the order of the leaves of ``out_structure``; a value may be there twice, and
        may be an input or stored.
    updates
        Stored value id to the id of the value that replaces it after a run: buffers that the
        program changed in place.
    tensors
        Contents of stored values by value id; on the meta device where nothing was loaded. Not
        part of a graph's equality.
    training
        Whether the model was in training mode when it was captured; None where that is not known.
        Nothing that a graph computes follows from it, and graphs made of this one need not say.
    captured
        What it was captured from, for questions about other sizes of its inputs.
    """

    name: str
    values: dict[int, IRValue] = field(default_factory=dict)
    nodes: list[IRNode] = field(default_factory=NodeList)
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    updates: dict[int, int] = field(default_factory=dict)
    in_structure: Arguments | None = None
    out_structure: Tree | None = None
    tensors: dict[int, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)
    training: bool | None = field(default=None, compare=False, repr=False)
    captured: Captured | None = field(default=None, compare=False, repr=False)
    next_id: int = field(default=0, compare=False, repr=False)
    _taken: dict[str, int] = field(default_factory=dict, compare=False, repr=False)

    def __setattr__(self, name: str, value: Any) -> None:
        # What replaces the nodes may be any list; they stay callable.
        is_plain = name == "nodes" and not isinstance(value, NodeList)
        object.__setattr__(self, name, NodeList(value) if is_plain else value)

    def new_value(
        self,
        name: str,
        shape: Sequence[int],
        dtype: str,
        *,
        device: str = "cpu",
        role: Role = "tmp",
        strides: Sequence[int] | None = None,
        names: Sequence[str] = (),
        placements: Sequence[tuple[int, int]] | None = None,
        init: Init | None = None,
        persistent: bool = True,
    ) -> IRValue:
        """Add a value under a fresh id and, where ``name`` is taken, under ``name__k``.

        Raises GraphError where the strides are not as many as the sizes.
        """
        if strides is not None and len(strides) != len(shape):
            raise GraphError(f"value %{name} has {len(strides)} strides for {len(shape)} sizes")
        value = IRValue(
            id=self.fresh_id(),
            name=self._free_name(name),
            meta=TensorMeta(tuple(shape), dtype, strides_or_none(shape, strides)),
            device=device,
            role=role,
            names=tuple(names),
            placements=tuple(placements) if placements is not None else None,
            init=init,
            persistent=persistent,
        )
        self.values[value.id] = value
        return value

    def add_copy(self, value: IRValue, name: str, role: Role) -> IRValue:
        """Add a value like one of another graph; in another role it is no stored one's slice."""
        copy = value.wired(None, [])
        copy.id, copy.name = self.next_id, self._free_name(name)
        self.next_id += 1
        if role != value.role:
            copy.role, copy.names, copy.placements, copy.init = role, (), None, None
        if (meta := value.meta).strides is not None:
            strides = strides_or_none(meta.shape, meta.strides)
            copy.meta = TensorMeta(meta.shape, meta.dtype, strides)
        self.values[copy.id] = copy
        return copy

    def emit(
        self,
        op: str,
        inputs: Sequence[int],
        outputs: Sequence[int | None],
        attrs: dict[str, Any] | None = None,
        *,
        scopes: tuple[Scope, ...] = (),
        source: Source | None = None,
        node_id: int | None = None,
    ) -> IRNode:
        """Append a call of ``op`` that reads and makes the given values. Raises GraphError.

        ``outputs`` holds None at the places where the call returns no tensor.
        ``node_id`` is an id that `fresh_id` gave earlier; a fresh one by default.
        """
        node_id = self.fresh_id() if node_id is None else node_id
        made = [value_id for value_id in outputs if value_id is not None]
        absent = tuple(i for i, value_id in enumerate(outputs) if value_id is None)
        attrs = dict(attrs or {})
        node = IRNode(node_id, op, list(inputs), made, attrs, scopes, source, absent)
        values = self.values
        for value_id in (*node.inputs, *node.outputs):
            if value_id not in values:
                raise GraphError(f"{op}: the graph {self.name!r} has no value {value_id}")
        for value_id in node.outputs:
            value = values[value_id]
            if value.producer is not None:
                raise GraphError(f"value %{value.name} already has a producer")
            value.producer = node.id
        for value_id in dict.fromkeys(node.inputs):
            values[value_id].users.append(node.id)
        self.nodes.append(node)
        return node

    def fresh_id(self) -> int:
        """The next unused id; values and nodes share one count."""
        self.next_id += 1
        return self.next_id - 1

    def check(self) -> None:
        """Prove the graph: order, producers, users, names, attributes, calls, ends and contents.

        Raises GraphError, with the node and the value, at the first rule that it breaks.
        """
        validate(self)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph as the captured model would; stored values come from ``tensors``.

        Raises InputError where the arguments are not what was captured, WeightError where a
        stored value has no contents, GraphError where a node is before one that it needs.
        """
        return run_graph(self, args, kwargs)

    def __repr__(self) -> str:
        return (
            f"IRGraph(name={self.name!r}, inputs={len(self.inputs)}, nodes={len(self.nodes)}, "
            f"outputs={len(self.outputs)})"
        )

    def __str__(self) -> str:
        return format_graph(self)

    @property
    def output_names(self) -> list[str]:
        """The names of the outputs, in order."""
        if self.out_structure is None:
            return [self.values[value_id].name for value_id in self.outputs]
        return [leaf.name for leaf in leaves(self.out_structure)]

    def node_by_id(self) -> dict[int, IRNode]:
        """Nodes by id."""
        return {node.id: node for node in self.nodes}

    def stored(self) -> Iterator[IRValue]:
        """Parameters, buffers, state and constants, in the order of their ids."""
        return (value for value in self.values.values() if value.role in STORED_ROLES)

    def take_names(self) -> None:
        """Note that the names of all values are taken, where they were put in by hand."""
        self._taken = {value.name: 0 for value in self.values.values()}

    def _free_name(self, wanted: str) -> str:
        """``wanted``, or the next free ``wanted__k``; takes it."""
        name = wanted
        while name in self._taken:
            self._taken[wanted] += 1
            name = f"{wanted}__{self._taken[wanted]}"
        self._taken[name] = 0
        return name


# --- text -----------------------------------------------------------------------------------------
#
# A declaration a line for inputs and stored values, a node a line:
#
#     graph mlp
#     input %x: f32[4, 8]
#     param %fc.weight: f32[16, 8] = "fc.weight"
#     state %fc.weight.step: f32[] = "optimizer.fc.weight.step" zeros
#     in fc:torch.nn.modules.linear.Linear
#       %linear: f32[4, 16] = aten.linear.default(%x, %fc.weight, bias=None)  # mlp.py:12
#     return %linear
#     arguments {...}
#     result {...}
#
# Where a call returns no tensor is ``_``: ``%dx: f32[4, 8], _, _ = …_backward.default(…)``.
# An ``in`` line says which modules are around the nodes after it, outermost first.

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
    parts = (f"{format_name(s.path)}:{_quoted_unless(PLAIN_CLASS, s.cls)}" for s in scopes)
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


# --- training steps -------------------------------------------------------------------------------


def is_step(graph: IRGraph) -> bool:
    """Whether the graph is a training step: whether it holds a marker."""
    return any(is_marker(node.op) for node in graph.nodes)


def forward_nodes(graph: IRGraph) -> list[IRNode]:
    """The operators that no marker comes before, in order: what can run before any `Backward`.

    In a graph that is no training step these are all nodes.
    """
    late: set[int] = set()
    found = []
    for node in graph.nodes:
        if is_marker(node.op) or not late.isdisjoint(node.inputs):
            late.update(node.outputs)
        else:
            found.append(node)
    return found


# --- dead code ------------------------------------------------------------------------------------
#
# A node that draws random numbers, if only in training, stays, used or not, so that the numbers of
# others are what they were; so do nodes without results, which are there for an effect.


def remove_dead_code(graph: IRGraph, needed: Iterable[int]) -> None:
    """Drop nodes and stored values that the values ``needed`` do not depend on."""
    live = live_values(graph, needed)
    dropped = {node.id for node in graph.nodes if not _is_kept(node, live)}
    graph.nodes[:] = (node for node in graph.nodes if node.id not in dropped)
    for value_id, value in list(graph.values.items()):
        if value_id in live or value.role == "input":
            value.users = [user for user in value.users if user not in dropped]
        else:
            del graph.values[value_id]
            graph.tensors.pop(value_id, None)


def live_values(graph: IRGraph, needed: Iterable[int]) -> set[int]:
    """The values ``needed`` and all that they, or what has an effect, depend on."""
    live = set(needed)
    for node in reversed(graph.nodes):
        if _is_kept(node, live):
            live.update(node.inputs, node.outputs)
    return live


def _is_kept(node: IRNode, live: set[int]) -> bool:
    has_effect = not node.outputs or is_marker(node.op) or is_random(node, in_training=True)
    return has_effect or not live.isdisjoint(node.outputs)


# --- garbage --------------------------------------------------------------------------------------


@contextmanager
def without_collection() -> Iterator[None]:
    """Collect no garbage inside; afterwards as before. May be nested.

    Rewriting and planning make many small objects and drop them at once, by their reference
    counts; a collector that walks all that the process holds every few thousand of them takes more
    time than the work (twice as long, for a training step of 64 layers).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
