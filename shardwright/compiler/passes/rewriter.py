"""Writing a graph anew from another: what every pass is made of.

A pass goes through the nodes in order and keeps each one, leaves it out, or writes others for it
and says which value replaces which. The source stays as it is; the result has the same inputs,
stored values and ends. Values that are kept keep their ids and names, every value is made before it
is read, and a replacement has the shape, dtype and strides of what it replaces, so that views of it
stay right. Kernel calls that an emitter wrote are not kept: which results are read may be another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwright.errors import GraphError
from shardwright.ir import IRGraph, IRNode, IRValue
from shardwright.ir.graph import live_values
from shardwright.ir.inference import Inference
from shardwright.ir.operators import named_arguments, resolve, signature
from shardwright.ir.tensor_meta import dtype_name


class Rewriter:
    """One graph under construction; ids are those of the source, and new ones beyond them.

    ``inference`` may be shared between passes: it remembers what operators make.
    """

    def __init__(self, source: IRGraph, inference: Inference | None = None) -> None:
        self.source = source
        self.inference = inference or Inference()
        self.made = IRGraph(source.name, next_id=source.next_id, _taken=dict(source._taken))
        self.made.in_structure = source.in_structure
        self.made.out_structure = source.out_structure
        self.made.inputs = list(source.inputs)
        self.made.tensors = dict(source.tensors)
        self._now: dict[int, int] = {}
        for value in source.values.values():
            if value.producer is None:
                self.made.values[value.id] = value.wired(None, [])

    # --- values -----------------------------------------------------------------------------

    def now(self, value_id: int) -> int:
        """The value that stands for one of the source."""
        return self._now.get(value_id, value_id)

    def of(self, value_id: int) -> IRValue:
        """A value of the result by its id."""
        return self.made.values[value_id]

    def replace(self, old: int, new: int) -> None:
        """From here on the result's value ``new`` stands for the source's ``old``.

        Raises GraphError where it has another shape, dtype or strides.
        """
        before, after = self.source.values[old], self.made.values[new]
        if not same_layout(before, after):
            raise GraphError(
                f"%{after.name} {after.dtype}{list(after.shape)} with strides {after.strides} "
                f"cannot stand for %{before.name} {before.dtype}{list(before.shape)} with strides "
                f"{before.strides}"
            )
        if old != new:
            self._now[old] = new

    def fresh(self, like: IRValue) -> IRValue:
        """A value not yet made, of the same kind under a name of its own."""
        return self.made.new_value(like.name, like.shape, like.dtype, strides=like.strides)

    def constant(self, name: str, tensor: torch.Tensor) -> int:
        """A stored value that holds ``tensor``."""
        value = self.made.new_value(
            name, tensor.shape, dtype_name(tensor.dtype), role="constant", strides=tensor.stride()
        )
        value.names = (value.name,)
        self.made.tensors[value.id] = tensor
        return value.id

    # --- nodes ------------------------------------------------------------------------------

    def keep(self, node: IRNode) -> None:
        """Append a node of the source as it is, on the values that stand for its inputs."""
        now = self._now
        inputs = [now.get(value_id, value_id) for value_id in node.inputs]
        self._append(node, node.id, node.op, inputs, node.outputs, node.attrs, node.absent)

    def emit(
        self,
        op: str,
        inputs: Sequence[int],
        outputs: Sequence[IRValue | None],
        attrs: Mapping[str, Any],
        like: IRNode,
    ) -> None:
        """Append a call that makes ``outputs``: values of the source, or fresh ones.

        ``inputs`` are ids of the result, ``like`` the node whose place in the program it has.
        """
        made = [value.id for value in outputs if value is not None]
        absent = tuple(i for i, value in enumerate(outputs) if value is None)
        self._append(like, self.made.fresh_id(), op, list(inputs), made, dict(attrs), absent)

    def write(
        self, op: str, given: Mapping[str, Any], outputs: Sequence[IRValue | None], like: IRNode
    ) -> None:
        """Append a call by all its arguments' names; tensors are ids of the source, as `Tensor`."""
        here = {
            name: Tensor(self.now(item)) if isinstance(item, Tensor) else item
            for name, item in given.items()
        }
        inputs, attrs = call_attributes(op, here)
        self.emit(op, inputs, outputs, attrs, like)

    def call(
        self, op: str, inputs: Sequence[int], attrs: Mapping[str, Any], like: IRNode, name: str
    ) -> list[int | None]:
        """Append a call whose results are inferred; gives their ids."""
        found = self.inference.outputs(op, [self.made.values[i] for i in inputs], attrs)
        made = [
            None
            if tensor is None
            else self.made.new_value(
                name, tensor.shape, dtype_name(tensor.dtype), strides=tensor.stride()
            )
            for tensor in found
        ]
        self.emit(op, inputs, made, attrs, like)
        return [None if value is None else value.id for value in made]

    def finish(self, *, prune: bool = False) -> IRGraph:
        """The result; with ``prune`` without nodes that nothing needs."""
        graph, source = self.made, self.source
        graph.outputs = [self.now(value_id) for value_id in source.outputs]
        graph.updates = {old: self.now(new) for old, new in source.updates.items()}
        if prune:
            _prune(graph)
        returned = set(graph.outputs)
        unmade = []
        for value in graph.values.values():
            if value.producer is not None:
                value.role = "output" if value.id in returned else "tmp"
            elif value.role in ("tmp", "output"):
                unmade.append(value.id)
        for value_id in unmade:
            del graph.values[value_id]
        return graph

    def _append(
        self,
        like: IRNode,
        node_id: int,
        op: str,
        inputs: list[int],
        outputs: list[int],
        attrs: dict[str, Any],
        absent: tuple[int, ...],
    ) -> None:
        values = self.made.values
        for value_id in outputs:
            if value_id in values:
                values[value_id].producer = node_id
            else:
                values[value_id] = self.source.values[value_id].wired(node_id, [])
        for value_id in inputs if len(inputs) == 1 else dict.fromkeys(inputs):
            values[value_id].users.append(node_id)
        scopes, source = like.scopes, like.source
        node = IRNode(node_id, op, inputs, outputs, attrs, scopes, source, absent)
        self.made.nodes.append(node)


def dead_nodes(graph: IRGraph) -> list[IRNode]:
    """The nodes that nothing needs.

    A node that draws random numbers is none, used or not, so that others draw what they drew.
    """
    live = live_values(graph, [*graph.outputs, *graph.updates.values()])
    return [node for node in graph.nodes if node.outputs and live.isdisjoint(node.outputs)]


def _prune(graph: IRGraph) -> None:
    """Drop the dead nodes of a graph under construction."""
    dropped = dead_nodes(graph)
    if not dropped:
        return
    gone = {node.id for node in dropped}
    graph.nodes = [node for node in graph.nodes if node.id not in gone]
    for node in dropped:
        for value_id in node.outputs:
            del graph.values[value_id]
    for value_id in {value_id for node in dropped for value_id in node.inputs}:
        if (value := graph.values.get(value_id)) is not None:
            value.users = [user for user in value.users if user not in gone]


def same_layout(a: IRValue, b: IRValue) -> bool:
    """Whether two values have one shape and dtype, and the same places in memory."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return a.strides == b.strides or a.meta.same_order(b.meta.full_strides)


def bound(op: str, inputs: Sequence[int], attrs: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments by the names in its operator's schema; tensors are ids, as `Tensor`."""
    return named_arguments(resolve(op), [Tensor(i) for i in inputs], dict(attrs))


def arguments(node: IRNode) -> dict[str, Any]:
    """A node's arguments, as `bound` gives them."""
    return bound(node.op, node.inputs, node.attrs)


class Tensor(int):
    """The id of a value among a call's arguments."""

    __slots__ = ()


def call_attributes(op: str, given: Mapping[str, Any]) -> tuple[list[int], dict[str, Any]]:
    """Inputs and attributes of a call whose arguments are ``given`` by name, all of the schema's.

    The mirror of `bound` for operators that take no lists of tensors.
    """
    inputs: list[int] = []
    attrs: dict[str, Any] = {}
    for parameter in signature(resolve(op)).parameters:
        value = given[parameter.name]
        if isinstance(value, Tensor):
            inputs.append(int(value))
        else:
            attrs[parameter.name] = value
    return inputs, attrs
