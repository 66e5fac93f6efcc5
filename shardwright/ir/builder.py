"""Builder: the one writer of a graph.

Capture uses it, transformations use it, and a person can write a graph by hand with it:

    builder = Builder("mlp")
    x = builder.input("x", (4, 8), "f32")
    weight = builder.param("fc.weight", torch.randn(16, 8))
    y = builder.call("aten.linear.default", x, weight)
    graph = builder.finish(outputs=y)

`finish` numbers ids in one order (inputs, stored values, then each node and what it makes), so
that two graphs built alike are equal, and validates.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from keyword import iskeyword
from typing import Any

import torch

from shardwright.errors import GraphError
from shardwright.ir.graph import IRGraph
from shardwright.ir.inference import Inference
from shardwright.ir.operators import is_marker, operator_name, resolve, signature, split_call
from shardwright.ir.structure import Arguments, Fixed, Leaf, Parameter, Tree, TupleTree
from shardwright.ir.tensor_meta import dtype_name, torch_dtype
from shardwright.ir.validate import validate
from shardwright.ir.values import Emitted, IRNode, IRValue, Role, Scope, Source
from shardwright.torch_internals import OpOverload

ValueLike = IRValue | int

Emitter = Callable[[IRGraph, IRNode], tuple[Emitted, ...]]
"""A backend: the kernel calls of a node that was just appended to a graph."""


class Builder:
    """Writes a graph node by node. Values may be given as `IRValue` or by id.

    ``ctx`` is a backend's emitter, which gives each node its kernel calls when it is appended.
    """

    def __init__(
        self,
        name: str = "graph",
        *,
        inference: Inference | None = None,
        ctx: Emitter | None = None,
    ) -> None:
        self.graph = IRGraph(name)
        self._ctx = ctx
        self._scopes: tuple[Scope, ...] = ()
        self._inference = inference or Inference()

    # --- values -----------------------------------------------------------------------------

    def input(
        self,
        name: str,
        shape: Sequence[int],
        dtype: str = "f32",
        *,
        strides: Sequence[int] | None = None,
        device: str = "cpu",
    ) -> IRValue:
        """An input of the graph."""
        value = self.graph.new_value(
            name, shape, dtype, role="input", strides=strides, device=device
        )
        self.graph.inputs.append(value.id)
        return value

    def param(self, name: str, tensor: torch.Tensor, **options: Any) -> IRValue:
        """A parameter, stored under ``name``; options as for `stored`."""
        return self.stored("param", name, tensor, **options)

    def buffer(self, name: str, tensor: torch.Tensor, **options: Any) -> IRValue:
        """A buffer, stored under ``name``."""
        return self.stored("buffer", name, tensor, **options)

    def state(self, name: str, tensor: torch.Tensor, **options: Any) -> IRValue:
        """Optimizer or other state, stored under ``name``."""
        return self.stored("state", name, tensor, **options)

    def constant(self, name: str, tensor: torch.Tensor, **options: Any) -> IRValue:
        """A constant tensor of the program, stored under ``name``."""
        return self.stored("constant", name, tensor, **options)

    def stored(
        self,
        role: Role,
        name: str,
        tensor: torch.Tensor,
        *,
        names: Sequence[str] = (),
        placements: Sequence[tuple[int, int]] | None = None,
        persistent: bool = True,
    ) -> IRValue:
        """A value whose contents are outside the graph: ``tensor``, possibly on meta.

        ``names`` are all names under which a checkpoint may hold it, the value's by default.
        """
        value = self.graph.new_value(
            name,
            tensor.shape,
            dtype_name(tensor.dtype),
            role=role,
            strides=tensor.stride(),
            device=_device_name(tensor),
            names=names,
            placements=placements,
            persistent=persistent,
        )
        value.names = value.names or (value.name,)
        self.graph.tensors[value.id] = tensor
        return value

    def zeros(self, role: Role, name: str, tensor: torch.Tensor) -> IRValue:
        """A stored value like ``tensor`` that exists nowhere yet and begins with zeros."""
        value = self.stored(role, name, tensor)
        value.init = "zeros"
        del self.graph.tensors[value.id]
        return value

    def value(
        self,
        name: str,
        shape: Sequence[int],
        dtype: str = "f32",
        *,
        strides: Sequence[int] | None = None,
        device: str = "cpu",
    ) -> IRValue:
        """A value that a later `emit` makes (``outputs=``)."""
        return self.graph.new_value(name, shape, dtype, strides=strides, device=device)

    # --- nodes ------------------------------------------------------------------------------

    def call(self, op: OpOverload | str, /, *args: Any, **kwargs: Any) -> Any:
        """Emit a call written as in Python, with values in place of tensors.

        Returns the resulting value, or a list of them if the operator returns several. Raises
        GraphError.
        """
        overload = resolve(op) if isinstance(op, str) else op
        inputs, attrs = split_call(
            overload, args, kwargs, is_tensor=lambda item: isinstance(item, IRValue)
        )
        return self.emit(operator_name(overload), inputs, attrs)

    def emit(
        self,
        op: str,
        inputs: Sequence[ValueLike],
        attrs: Mapping[str, Any] | None = None,
        *,
        outputs: Sequence[IRValue | torch.Tensor | None] | None = None,
        name: str | None = None,
        scopes: tuple[Scope, ...] | None = None,
        source: Source | None = None,
    ) -> Any:
        """Append a node (see `values` for the form of inputs and attrs) and return what it makes.

        ``outputs`` gives the specs of what is made, as tensors (fake or meta ones do) or as
        values from `value`, and None where the call returns no tensor; left out, they are
        inferred. A marker makes what ``outputs`` says.
        Returns one value, or a list of them where the operator returns several, with None where
        it returns no tensor.
        Raises GraphError.
        """
        ids = [self._id_of(value) for value in inputs]
        attrs = dict(attrs or {})
        if outputs is None:
            outputs = [] if is_marker(op) else self._inference.outputs(op, self._values(ids), attrs)
        base = name or _short_name(op)
        device = self.graph.values[ids[0]].device if ids else "cpu"
        values = [None if item is None else self._output(item, base, device) for item in outputs]
        if not ids and len(values) == 1 and values[0] and attrs.get("dtype", ...) is None:
            attrs["dtype"] = torch_dtype(values[0].dtype)  # whatever torch's default is at a run
        scopes = self._scopes if scopes is None else scopes
        made = [None if value is None else value.id for value in values]
        node = self.graph.emit(op, ids, made, attrs, scopes=scopes, source=source)
        if self._ctx is not None and not is_marker(op):
            node.emitted = self._ctx(self.graph, node)
        one = len(values) == 1 if is_marker(op) else signature(resolve(op)).returns_one
        return values[0] if one else values

    def inline(
        self,
        graph: IRGraph,
        inputs: Sequence[ValueLike],
        *,
        prefix: str = "",
        stored: Mapping[int, ValueLike] | None = None,
    ) -> list[IRValue]:
        """Append another graph's nodes and stored values, fed by ``inputs``; gives its outputs.

        ``prefix`` is the path under which its stored values and modules are here. ``stored``
        maps those of its stored values that this graph holds already to the values here; where an
        update replaces one, what is appended reads the new value.
        Raises GraphError where ``inputs`` are not as many as the graph's.
        """
        if len(inputs) != len(graph.inputs):
            raise GraphError(
                f"graph {graph.name!r} has {len(graph.inputs)} inputs, {len(inputs)} given"
            )
        mapping = dict(zip(graph.inputs, map(self._id_of, inputs), strict=True))
        homes = {old: self._id_of(here) for old, here in (stored or {}).items()}
        for value in graph.stored():
            if value.id not in homes:
                homes[value.id] = self.copy_value(graph, value, prefix=prefix).id
            mapping[value.id] = self.graph.updates.get(homes[value.id], homes[value.id])
        for node in graph.nodes:
            self.copy_node(graph, node, mapping, prefix=prefix)
        self.graph.updates |= {homes[old]: mapping[new] for old, new in graph.updates.items()}
        return self._values([mapping[value_id] for value_id in graph.outputs])

    def copy_value(
        self, graph: IRGraph, value: IRValue, *, role: Role | None = None, prefix: str = ""
    ) -> IRValue:
        """The same value in this graph, with its contents; ``role`` replaces its role.

        ``prefix`` is a path before the name, and before the names in a checkpoint.
        """
        role = role or value.role
        copy = self.graph.add_copy(value, _under(prefix, value.name), role)
        if prefix:
            copy.names = tuple(f"{prefix}.{name}" for name in copy.names)
        if role == "input":
            self.graph.inputs.append(copy.id)
        elif value.id in graph.tensors and copy.is_stored:
            self.graph.tensors[copy.id] = graph.tensors[value.id]
        return copy

    def copy_node(
        self, graph: IRGraph, node: IRNode, mapping: dict[int, int], *, prefix: str = ""
    ) -> None:
        """The same node in this graph; ``mapping`` takes value ids there to ids here, and grows.

        ``prefix`` is a path before those of its modules.
        """
        for value_id in node.outputs:
            value = graph.values[value_id]
            role: Role = "tmp" if value.role == "output" else value.role
            mapping[value_id] = self.copy_value(graph, value, role=role).id
        self.graph.emit(
            node.op,
            [mapping[value_id] for value_id in node.inputs],
            [None if value_id is None else mapping[value_id] for value_id in node.results],
            node.attrs,
            scopes=self._scopes + _scopes_under(prefix, node.scopes),
            source=node.source,
        )

    @contextmanager
    def scope(
        self, path: str, cls: str, arguments: tuple[tuple[str, Any], ...] | None = None
    ) -> Iterator[None]:
        """Nodes emitted inside belong to the module that `Scope` describes by these."""
        before = self._scopes
        self._scopes = (*before, Scope(path, cls, arguments))
        try:
            yield
        finally:
            self._scopes = before

    # --- the end ----------------------------------------------------------------------------

    def finish(
        self,
        outputs: ValueLike | Sequence[ValueLike],
        *,
        in_structure: Arguments | None = None,
        out_structure: Tree | None = None,
        updates: Mapping[int, int] | None = None,
    ) -> IRGraph:
        """Return the finished graph. Raises GraphError if it is invalid.

        Without structures, the inputs are parameters under their own names, and the result is a
        tensor, or a tuple if ``outputs`` is a sequence.
        """
        single = isinstance(outputs, (IRValue, int))
        listed = [outputs] if isinstance(outputs, (IRValue, int)) else outputs
        graph = _renumbered(
            self.graph,
            [self._id_of(value) for value in listed],
            self.graph.updates | dict(updates or {}),
        )
        graph.in_structure = in_structure or _named_inputs(graph)
        graph.out_structure = out_structure or _plain_outputs(len(listed), single=single)
        validate(graph)
        return graph

    # --- inside -----------------------------------------------------------------------------

    def _id_of(self, value: ValueLike) -> int:
        """The id of a value of this graph. Raises GraphError where it is none."""
        value_id = value.id if isinstance(value, IRValue) else value
        if value_id not in self.graph.values:
            raise GraphError(f"the graph {self.graph.name!r} has no value {value_id}")
        if isinstance(value, IRValue) and self.graph.values[value_id] is not value:
            raise GraphError(f"%{value.name} is a value of another graph than {self.graph.name!r}")
        return value_id

    def _values(self, ids: Sequence[int]) -> list[IRValue]:
        return [self.graph.values[value_id] for value_id in ids]

    def _output(self, item: IRValue | torch.Tensor, base: str, device: str) -> IRValue:
        if isinstance(item, IRValue):
            self._id_of(item)
            return item
        found = device if item.is_meta else _device_name(item)
        return self.graph.new_value(
            base, item.shape, dtype_name(item.dtype), strides=item.stride(), device=found
        )


def _under(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _scopes_under(prefix: str, scopes: tuple[Scope, ...]) -> tuple[Scope, ...]:
    if not prefix:
        return scopes
    return tuple(scope._replace(path=_under(prefix, scope.path)) for scope in scopes)


def _device_name(tensor: torch.Tensor) -> str:
    return "cpu" if tensor.is_meta else str(tensor.device)


def _short_name(op: str) -> str:
    """The variable name for what an operator makes: ``aten.layer_norm.default`` → layer_norm."""
    return op if is_marker(op) else op.split(".")[1]


def _named_inputs(graph: IRGraph) -> Arguments:
    """Inputs as parameters of their own names, or as ``*inputs`` where one is no identifier."""
    names = [graph.values[value_id].name for value_id in graph.inputs]
    items = tuple(Leaf(name, i) for i, name in enumerate(names))
    if not all(name.isidentifier() and not iskeyword(name) for name in names):
        kind = inspect.Parameter.VAR_POSITIONAL.name
        return Arguments((Parameter("inputs", kind, TupleTree(items)),))
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD.name
    return Arguments(tuple(Parameter(leaf.name, kind, leaf) for leaf in items))


def _plain_outputs(count: int, *, single: bool) -> Tree:
    if single:
        return Leaf("output", 0)
    if count == 0:
        return Fixed(None)
    return TupleTree(tuple(Leaf(f"output_{i}", i) for i in range(count)))


def _renumbered(graph: IRGraph, outputs: Sequence[int], updates: Mapping[int, int]) -> IRGraph:
    """The graph with these ends, and ids in one order: inputs, stored, each node and its outputs.

    Values that nothing makes are left out. Raises GraphError where one of them is used.
    """
    result = IRGraph(graph.name)
    mapping: dict[int, int] = {}
    returned = set(outputs)

    def take(value_id: int, role: Role, producer: int | None = None) -> None:
        copy = graph.values[value_id].wired(producer, [])
        copy.id, copy.role = result.fresh_id(), role
        mapping[value_id] = copy.id
        result.values[copy.id] = copy

    def taken(value_ids: Iterable[int]) -> list[int]:
        """The ids in the result."""
        ids = list(value_ids)
        for value_id in ids:
            if value_id not in mapping:
                name = graph.values[value_id].name if value_id in graph.values else value_id
                raise GraphError(f"%{name} is used, but no node before that makes it")
        return [mapping[value_id] for value_id in ids]

    for value in (*map(graph.values.__getitem__, graph.inputs), *graph.stored()):
        take(value.id, value.role)
    for node in graph.nodes:
        node_id, inputs = result.fresh_id(), taken(node.inputs)
        for value_id in node.outputs:
            take(value_id, "output" if value_id in returned else "tmp", node_id)
        for value_id in dict.fromkeys(inputs):
            result.values[value_id].users.append(node_id)
        made = [mapping[value_id] for value_id in node.outputs]
        result.nodes.append(
            replace(node, id=node_id, inputs=inputs, outputs=made, attrs=dict(node.attrs))
        )
    result.inputs = taken(graph.inputs)
    result.outputs = taken(outputs)
    result.updates = dict(zip(taken(updates), taken(updates.values()), strict=True))
    result.tensors = {mapping[value_id]: t for value_id, t in graph.tensors.items()}
    result.take_names()
    return result
