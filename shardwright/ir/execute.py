"""A graph as a function of flat tensors.

`compile_graph` writes one Python function with a line a node (operators resolved, attributes
bound, dead values deleted), so that running it costs one call of torch a node and nothing else.
The lines are made from positions in the graph, never from text of the graph. An exception on the
way carries a note that names the node, its module and its source line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shardwright.errors import GraphError, InputError, WeightError
from shardwright.ir.dtypes import describe_dtype, torch_dtype
from shardwright.ir.operators import join_call, resolve, signature
from shardwright.ir.structure import flatten_call, leaves, rebuild
from shardwright.ir.values import IRNode, IRValue

if TYPE_CHECKING:
    from shardwright.ir.graph import IRGraph

_FILE = "<shardwright graph>"


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled graph: ``program(tensors)`` takes and gives flat lists.

    ``arguments`` are the value ids that it takes, in order: the graph's inputs, then the stored
    values that are used. It gives the graph's outputs, then its updates' new values.
    """

    arguments: tuple[int, ...]
    nodes: tuple[IRNode, ...]
    function: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run; an exception gets a note that names the node it came from."""
        try:
            return self.function(tensors)
        except Exception as error:
            if (node := self._failed_node(error)) is not None:
                error.add_note(f"in {describe_node(node)}")
            raise

    def _failed_node(self, error: Exception) -> IRNode | None:
        """The node whose line raised; line 1 is the ``def``, line 2 unpacks the arguments."""
        frame = error.__traceback__
        while frame is not None:
            if frame.tb_frame.f_code.co_filename == _FILE:
                index = frame.tb_lineno - 3
                return self.nodes[index] if 0 <= index < len(self.nodes) else None
            frame = frame.tb_next
        return None


def describe_node(node: IRNode) -> str:
    """Operator, module and source line, for messages."""
    scope = f" in {node.scope} ({node.scope_class})" if node.scope else ""
    source = f" at {node.source.file}:{node.source.line}" if node.source else ""
    return f"{node.op}{scope}{source}"


def compile_graph(graph: IRGraph, device: str | torch.device = "cpu") -> Program:
    """The graph as a `Program` whose factories make their tensors on ``device``.

    Raises GraphError where the graph holds a marker, or an operator that is not to be had.
    """
    results = [*graph.outputs, *graph.updates.values()]
    returned = set(results)
    used = [value.id for value in graph.stored() if value.users or value.id in returned]
    arguments = (*graph.inputs, *used)
    namespace: dict[str, Any] = {}
    dead = _last_uses(graph, keep={*arguments, *results})
    lines = ["def run(tensors):", f"    {_targets(arguments) or '()'} = tensors"]
    for node in graph.nodes:
        line = _call_line(graph, node, namespace, torch.device(device))
        dropped = "".join(f"; del v{value_id}" for value_id in dead[node.id])
        lines.append(f"    {line}{dropped}")
    lines.append(f"    return [{', '.join(f'v{value_id}' for value_id in results)}]")
    exec(compile("\n".join(lines), _FILE, "exec"), namespace)
    return Program(arguments, tuple(graph.nodes), namespace["run"])


def _targets(value_ids: Sequence[int]) -> str:
    return "".join(f"v{value_id}, " for value_id in value_ids)


def _call_line(
    graph: IRGraph, node: IRNode, namespace: dict[str, Any], device: torch.device
) -> str:
    """``v7 = f7(v1, v2, k7_0)``, its function and constants filed in ``namespace``."""
    overload = resolve(node.op)
    names = [_Name(f"v{value_id}") for value_id in node.inputs]
    args, kwargs = join_call(overload, names, node.attrs, device)
    namespace[f"f{node.id}"] = overload
    constants = _Constants(namespace, f"k{node.id}_")
    parts = [constants.expression(value) for value in args]
    parts += [f"{name}={constants.expression(value)}" for name, value in kwargs.items()]
    one = signature(overload).returns_one
    targets = f"v{node.outputs[0]}" if one else _targets(node.outputs) or "_"
    return f"{targets} = f{node.id}({', '.join(parts)})"


class _Name(str):
    """The name of a variable in the generated function."""

    __slots__ = ()


class _Constants:
    """Expressions for a call's arguments; what is no name becomes a constant of the namespace."""

    def __init__(self, namespace: dict[str, Any], prefix: str) -> None:
        self.namespace = namespace
        self.prefix = prefix
        self.count = 0

    def expression(self, value: Any) -> str:
        if isinstance(value, _Name):
            return value
        if value is None or isinstance(value, (bool, int)):
            return repr(value)
        if isinstance(value, list) and _holds_name(value):
            return f"[{', '.join(self.expression(item) for item in value)}]"
        key = f"{self.prefix}{self.count}"
        self.count += 1
        self.namespace[key] = value
        return key


def _holds_name(value: Any) -> bool:
    if isinstance(value, list):
        return any(_holds_name(item) for item in value)
    return isinstance(value, _Name)


def _last_uses(graph: IRGraph, keep: set[int]) -> dict[int, list[int]]:
    """For each node, the values that nothing reads after it."""
    dead: dict[int, list[int]] = {}
    seen = set(keep)
    for node in reversed(graph.nodes):
        last = [v for v in dict.fromkeys((*node.inputs, *node.outputs)) if v not in seen]
        seen.update(last)
        dead[node.id] = last
    return dead


def run_graph(graph: IRGraph, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a graph as the model it was captured from; returns the same kind of object.

    Stored values are read from ``graph.tensors``, never written. Raises InputError, WeightError.
    """
    if graph.in_structure is None or graph.out_structure is None:
        raise GraphError("the graph has no structure of inputs and outputs; finish it first")
    tensors = flatten_call(graph.in_structure, args, kwargs)
    named = zip(graph.inputs, leaves(graph.in_structure), tensors, strict=True)
    for value_id, leaf, tensor in named:
        check_input(graph.values[value_id], leaf.name, tensor)
    device = tensors[0].device if tensors else torch.device("cpu")
    program = compile_graph(graph, device)
    stored = [_contents(graph, value_id) for value_id in program.arguments[len(tensors) :]]
    results = program([*tensors, *stored])
    return rebuild(graph.out_structure, results)


def check_input(value: IRValue, name: str, tensor: torch.Tensor) -> None:
    """Raise InputError where ``tensor`` is not of the shape and dtype of ``value``."""
    if tuple(tensor.shape) != value.shape or tensor.dtype != torch_dtype(value.dtype):
        raise InputError(
            f"input {name!r} is {describe_dtype(tensor.dtype)}{list(tensor.shape)}, but the graph "
            f"was captured for {value.dtype}{list(value.shape)}; shapes are static, so pass "
            "tensors of that shape or capture again"
        )


def _contents(graph: IRGraph, value_id: int) -> torch.Tensor:
    value = graph.values[value_id]
    tensor = graph.tensors.get(value_id)
    if tensor is None or tensor.is_meta:
        raise WeightError(
            f"{value.role} {value.names[0]!r} has no contents (the model was built on the meta "
            "device); build a pipeline with weights=, or capture a model that holds them"
        )
    return tensor
