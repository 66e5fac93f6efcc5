"""A function of tensors as a graph of the operators that it runs below autograd.

Nothing is computed (tensors are fake), the graph is functional and flat, and a result that is an
argument is the argument's value. `tracing.functionalize` makes values of the calls, as it does of a
traced program: it follows views and in-place writes, and drops copies that do nothing.

`simplify` takes views that undo one another out of what was recorded. A linear layer's weight
gradient, which torch gives as ``t(t(mm(t(dy), x)))``, becomes the product ``mm(t(dy), x)``, and a
step that adds it up can be one ``addmm`` (see `accumulate`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.fx

from shardwright.errors import GraphError
from shardwright.ir import Builder, IRGraph, IRNode, IRValue
from shardwright.ir.inference import as_kernels_make, memory_format_of
from shardwright.ir.tensor_meta import TensorMeta, dtype_name
from shardwright.ir.trusting import read_alike
from shardwright.torch_internals import (
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    operator_of,
    schema_of,
    without_autocast,
    without_dispatch_modes,
)
from shardwright.tracing.emitter import GraphEmitter
from shardwright.tracing.functionalize import Functionalizer
from shardwright.tracing.memory import TensorView

Function = Callable[[list[torch.Tensor]], Sequence[torch.Tensor | None]]


class RecordedBackward(NamedTuple):
    """What was recorded: ``builder.graph`` has the arguments as inputs.

    ``results`` are value ids, None where the function returned None.
    """

    builder: Builder
    results: list[int | None]


def record(
    function: Function, metas: Sequence[TensorMeta], mode: FakeTensorMode, device: str
) -> RecordedBackward:
    """Run ``function`` on fake tensors like these and record its operators.

    Raises CaptureError or GraphError where what it calls cannot be in a graph.
    """
    recorder = _BackwardRecorder()
    with without_autocast(), mode:
        tensors = [meta.empty(device) for meta in metas]
        for tensor in tensors:
            recorder.argument(tensor)
        with recorder:
            results = function(tensors)
    recorder.graph.output([recorder.node_of(item) for item in results if item is not None])
    builder = Builder("record")
    functionalizer = Functionalizer(GraphEmitter(builder))
    roots = [_root(builder, functionalizer, tensor) for tensor in tensors]
    places: list[TensorView] = functionalizer.walk(recorder.graph, roots)
    made = iter([functionalizer.memory.read(place).id for place in places])
    return RecordedBackward(builder, [None if item is None else next(made) for item in results])


def _root(builder: Builder, functionalizer: Functionalizer, tensor: torch.Tensor) -> TensorView:
    dtype = dtype_name(tensor.dtype)
    value = builder.input("x", tensor.shape, dtype, strides=tensor.stride())
    return functionalizer.memory.root(tensor, value, "input", value.name)


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    shape, strides = tensor.shape, tensor.stride()
    return torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)


_UNSAFE = frozenset(
    {
        torch.ops.aten.unsafe_split.Tensor,
        torch.ops.aten.unsafe_split_with_sizes.default,
        torch.ops.aten.unsafe_chunk.default,
    }
)
"""Their results are separate: torch writes to one and reads none of the others through it."""


def in_one_order(overload: OpOverload, args: Sequence[Any]) -> Sequence[Any]:
    """Arguments by place, copied where the checks of files would refuse how they lie.

    Derivatives of torch before 2.15 hand them over so; from then on torch's kernel sees to it,
    which files that other releases run cannot rely on.
    """
    names = read_alike(overload)
    if not names:
        return args
    call = dict(zip((one.name for one in schema_of(overload).arguments), args, strict=False))
    leading = call[names[-1]]
    on_cpu = leading.device.type == "cpu"
    order = memory_format_of(leading) if on_cpu else torch.contiguous_format
    return [*(call | {name: call[name].contiguous(memory_format=order) for name in names}).values()]


class _BackwardRecorder(TorchDispatchMode):
    """Notes each call that reaches the kernels, as a node of an fx graph."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = torch.fx.Graph()
        self._nodes: dict[int, torch.fx.Node] = {}
        self._kept: list[torch.Tensor] = []
        """Tensors in play; while they live no other has their id."""
        self._places: dict[int, tuple[torch.fx.Node, int] | None] = {}
        """By tensor's id the node of several results, and which of them it is."""

    def argument(self, tensor: torch.Tensor) -> None:
        """Take an argument of the function."""
        self._file(tensor, self.graph.placeholder(f"x{len(self._kept)}"))

    def node_of(self, tensor: torch.Tensor) -> torch.fx.Node:
        """The node that made a tensor. Raises GraphError where none did."""
        if id(tensor) not in self._nodes:
            self._constant(tensor)
        return self._nodes[id(tensor)]

    def _keep_shape(self, tensor: torch.Tensor) -> None:
        """Let the node that made a tensor know it as it is, before it is another view of itself.

        Kernels that torch composes of others transpose and unsqueeze in place what they made.
        """
        before = tensor.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        self._kept.append(before)
        node, place = self._nodes[id(tensor)], self._places[id(tensor)]
        node.meta["val"] = before
        if place is not None:
            parent, index = place
            made = list(parent.meta["val"])
            made[index] = before
            parent.meta["val"] = tuple(made)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload) or func.namespace == "prim":
            return func(*args, **kwargs)
        with self:
            args = in_one_order(func, args)
        node = self._call(func, args, kwargs)
        if torch.Tag.inplace_view in func.tags:
            self._keep_shape(args[0])
        made = func(*args, **kwargs)
        if func in _UNSAFE:
            made = [*map(_apart, made)]
        elif isinstance(made, tuple):
            made = as_kernels_make(func, made, args)
        elif isinstance(made, torch.Tensor):
            (made,) = as_kernels_make(func, (made,), args)
        self._file(made, node)
        return made

    def _call(
        self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> torch.fx.Node:
        given = tuple(map(self._argument, args))
        named = {key: self._argument(item) for key, item in kwargs.items()}
        return self.graph.create_node("call_function", func, given, named, name=operator_of(func))

    def _argument(self, item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return self.node_of(item)
        if isinstance(item, (list, tuple)):
            return [self._argument(one) for one in item]
        return item

    def _file(
        self,
        made: Any,
        node: torch.fx.Node,
        place: tuple[torch.fx.Node, int] | None = None,
    ) -> None:
        node.meta["val"] = made
        if isinstance(made, torch.Tensor):
            self._nodes[id(made)] = node
            self._places[id(made)] = place
            self._kept.append(made)
        elif isinstance(made, (list, tuple)):
            for i, item in enumerate(made):
                if isinstance(item, torch.Tensor):
                    one = self.graph.call_function(operator.getitem, (node, i))
                    self._file(item, one, (node, i))

    def _constant(self, tensor: torch.Tensor) -> None:
        """A number that the function holds in a tensor, as a call that makes it anew."""
        if tensor.numel() != 1 or type(tensor) is not torch.Tensor:
            raise GraphError(
                f"a backward reads a tensor {list(tensor.shape)} that is none of its operator's "
                "arguments; give it to the operator as an argument"
            )
        with without_dispatch_modes():
            number = tensor.item()
        options: dict[str, Any] = {"dtype": tensor.dtype, "device": tensor.device}
        call = (list(tensor.shape), number)
        self._file(tensor, self.graph.call_function(torch.ops.aten.full.default, call, options))


# --- simplification -----------------------------------------------------------------------------

_VIEWS = frozenset(
    {
        "aten.t.default",
        "aten.transpose.int",
        "aten.permute.default",
        "aten.numpy_T.default",
        "aten.view.default",
        "aten._unsafe_view.default",
        "aten.unsqueeze.default",
        "aten.squeeze.default",
        "aten.squeeze.dim",
        "aten.squeeze.dims",
        "aten.expand.default",
        "aten.alias.default",
    }
)
"""Views that begin where their input begins: shape and strides say which elements they show."""


def simplify(graph: IRGraph, results: Sequence[int | None]) -> list[int | None]:
    """Take views out of ``graph`` that show what another value shows; gives the results.

    ``t(t(x))`` is ``x``, and so is a view of a view that has the shape and strides of ``x``. Every
    result is bit for bit the same.
    """
    same: dict[int, int] = {}
    producers: dict[int, IRNode] = {}
    kept: list[IRNode] = []
    for node in graph.nodes:
        node.inputs = [same.get(value_id, value_id) for value_id in node.inputs]
        found = _seen_before(graph, node, producers) if node.op in _VIEWS else None
        if found is None:
            kept.append(node)
            producers |= dict.fromkeys(node.outputs, node)
        else:
            same[node.outputs[0]] = found
    graph.nodes[:] = kept
    return [None if value_id is None else same.get(value_id, value_id) for value_id in results]


def _seen_before(graph: IRGraph, node: IRNode, producers: Mapping[int, IRNode]) -> int | None:
    """The value further up a chain of views that shows the same as what ``node`` makes."""
    made = _shown(graph.values[node.outputs[0]])
    before: IRNode | None = node
    while before is not None and before.op in _VIEWS:
        source = before.inputs[0]
        if _shown(graph.values[source]) == made:
            return source
        before = producers.get(source)
    return None


def _shown(value: IRValue) -> object:
    return value.shape, value.strides
