"""The graph that is being written, for functions that write nodes themselves (seed 004, 2 and 3).

    def fused(x, weight):
        if not sw.is_tracing():
            return kernel(x, weight)
        ir = sw.get_ir()
        y = ir.new_value("y", x.shape, "f32")
        ir.emit("fused", [ir.value_of(x).id, ir.value_of(weight).id], [y.id], {"eps": 1e-5})
        return ir.tensor_of(y)

Under `compile_ir` the graph is a `LiveGraph`, which knows the step's tensors: the same tensor is
the same value, and a node is in the step's graph where the program emitted it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from shardwright.errors import GraphError
from shardwright.ir.graph import IRGraph
from shardwright.ir.operators import is_marker, join_call, resolve, signature
from shardwright.ir.tensor_meta import dtype_name, torch_dtype
from shardwright.ir.values import IRNode, IRValue
from shardwright.torch_internals import BEGINS_RANGE

_graph: ContextVar[IRGraph | None] = ContextVar("graph", default=None)


@contextmanager
def tracing(ir: IRGraph) -> Iterator[IRGraph]:
    """Inside, `is_tracing` is true and `get_ir` gives ``ir``.

    What is recorded is what functions write themselves. Training with torch's own, as an ordinary
    step does, is refused before anything of it is changed: GraphError; `compile_ir` records it.
    """
    token = _graph.set(ir)
    try:
        with nullcontext() if isinstance(ir, LiveGraph) else _WithoutTraining():
            yield ir
    finally:
        _graph.reset(token)


class _WithoutTraining(TorchFunctionMode):
    """Refuses what trains a model, which nobody records here."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = args[0] if func is BEGINS_RANGE else "backward()" if func in _BACKWARDS else ""
        if func in _BACKWARDS or name.startswith("Optimizer."):
            raise GraphError(
                f"`with tracing(graph):` does not record {name.rpartition('.')[2]}: inside it "
                "functions write their own nodes, and torch computes. compile_ir(step_fn, *inputs) "
                "records an ordinary step of training, and changes nothing of it"
            )
        return func(*args, **(kwargs or {}))


_BACKWARDS = (torch.Tensor.backward, torch.autograd.backward)


def is_tracing() -> bool:
    """Whether a graph is being recorded, as while `compile_ir` runs a step."""
    return _graph.get() is not None


def get_ir() -> IRGraph:
    """The graph that is being recorded. Raises GraphError if there is none."""
    graph = _graph.get()
    if graph is None:
        raise GraphError(
            "no graph is being written here; ask is_tracing() first, and use get_ir() inside "
            "`with tracing(ir):` or in a function that compile_ir runs"
        )
    return graph


MarkerCall = Callable[[str, dict[str, Any], Sequence[torch.Tensor], Sequence[IRValue]], Any]
"""Puts a marker into the program: its name, attributes, inputs and outputs; gives its tensors."""


class LiveGraph(IRGraph):
    """The graph of a step while its function runs.

    It holds the values and nodes that the function writes itself; in the step's finished graph
    they are among the others.
    """

    def __init__(self, name: str, mark: MarkerCall) -> None:
        super().__init__(name)
        self._mark = mark
        self._tensors: dict[int, torch.Tensor] = {}
        self._values: dict[int, IRValue] = {}

    def value_of(self, tensor: torch.Tensor) -> IRValue:
        """The value of one of the step's tensors, the same at each call."""
        if id(tensor) not in self._values:
            dtype = dtype_name(tensor.dtype)
            value = self.new_value("tensor", tensor.shape, dtype, strides=tensor.stride())
            self._bind(value, tensor)
        return self._values[id(tensor)]

    def tensor_of(self, value: IRValue | int) -> torch.Tensor:
        """The tensor of a value. Raises GraphError where no node has made it."""
        value_id = value.id if isinstance(value, IRValue) else value
        if value_id not in self._tensors:
            raise GraphError(f"no node has made the value {value_id} yet; emit one first")
        return self._tensors[value_id]

    def emit(
        self,
        op: str,
        inputs: Sequence[int],
        outputs: Sequence[int | None],
        attrs: dict[str, Any] | None = None,
        **options: Any,
    ) -> IRNode:
        """Append a node; what an operator's name says is called, any other name is a marker.

        Raises GraphError where the outputs are not what the operator makes.
        """
        tensors = [self.tensor_of(value_id) for value_id in inputs]
        made = [None if value_id is None else self.values[value_id] for value_id in outputs]
        attrs = {key: _listed(value) for key, value in (attrs or {}).items()}
        if is_marker(op):
            present = [value for value in made if value is not None]
            results = self._mark(op, attrs, tensors, present)
        else:
            results = _call(op, tensors, attrs)
        if len(results) != len(made):
            raise GraphError(f"{op} makes {len(results)} tensors, {len(made)} outputs are given")
        for value, tensor in zip(made, results, strict=True):
            if value is not None:
                _check_kind(op, value, tensor)
                self._bind(value, tensor)
        return super().emit(op, inputs, outputs, attrs, **options)

    def _bind(self, value: IRValue, tensor: torch.Tensor) -> None:
        self._tensors[value.id] = tensor
        self._values[id(tensor)] = value


def _call(op: str, tensors: Sequence[torch.Tensor], attrs: dict[str, Any]) -> list[Any]:
    """What an operator makes; attributes that are left out have the schema's defaults."""
    overload = resolve(op)
    parameters = signature(overload).parameters
    defaults = {p.name: p.default for p in parameters if not p.required and not p.takes_tensor}
    args, kwargs = join_call(overload, tensors, defaults | attrs)
    result = overload(*args, **kwargs)
    return [result] if signature(overload).returns_one else list(result)


def _check_kind(op: str, value: IRValue, tensor: torch.Tensor) -> None:
    if (value.shape, torch_dtype(value.dtype)) != (tuple(tensor.shape), tensor.dtype):
        raise GraphError(
            f"{op} makes {dtype_name(tensor.dtype)}{list(tensor.shape)}, but its output "
            f"%{value.name} is declared as {value.dtype}{list(value.shape)}"
        )


def _listed(value: Any) -> Any:
    """Tuples as the lists that attributes are."""
    return [_listed(item) for item in value] if isinstance(value, (list, tuple)) else value
