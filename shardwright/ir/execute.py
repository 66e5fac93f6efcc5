"""A graph as a function of flat tensors.

`compile_graph` writes one Python function with a line a node (operators resolved, attributes
bound, dead values deleted), so that running it costs one call of torch a node and nothing else.
The lines are made from positions in the graph, never from text of the graph. An exception on the
way carries a note that names the node, its module and its source line.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shardwright.errors import GraphError, InputError, WeightError
from shardwright.ir.aliasing import NOTHING, Donation, InPlace, donate
from shardwright.ir.operators import flatten_results, join_call, resolve, signature
from shardwright.ir.overloads import callable_of
from shardwright.ir.structure import flatten_call, leaves, rebuild
from shardwright.ir.tensor_meta import describe_dtype, torch_dtype
from shardwright.ir.validate import check_order
from shardwright.ir.values import IRNode, IRValue
from shardwright.torch_internals import OpOverload

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
            if (index := self._failed_node(error)) is not None:
                node = self.nodes[index]
                known = node.scopes or node.source
                error.add_note(
                    f"in {describe_node(node)}" if known else f"in node 'n{index}' ({node.op})"
                )
            raise

    def _failed_node(self, error: Exception) -> int | None:
        """Which node's line raised; line 1 is the ``def``, line 2 unpacks the arguments."""
        frame = error.__traceback__
        while frame is not None:
            if frame.tb_frame.f_code.co_filename == _FILE:
                index = frame.tb_lineno - 3
                return index if 0 <= index < len(self.nodes) else None
            frame = frame.tb_next
        return None


def describe_node(node: IRNode) -> str:
    """Operator, module and source line, for messages."""
    scope = f" in {node.scope} ({node.scope_class})" if node.scope else ""
    source = f" at {node.source.file}:{node.source.line}" if node.source else ""
    return f"{node.op}{scope}{source}"


def compile_graph(
    graph: IRGraph,
    device: str | torch.device = "cpu",
    *,
    donated: Mapping[int, int] | None = None,
    zeros: Collection[int] = (),
) -> Program:
    """The graph as a `Program` whose factories make their tensors on ``device``.

    ``donated`` maps arguments to the results that take their place, by value id: the program
    leaves these results in the arguments' memory, by running nodes in place where it can. The
    contents of ``zeros``, which are among them, count as zeros whatever they are.

    Raises GraphError where the graph holds a marker, an operator that is not to be had, or a node
    before one that it needs.
    """
    check_order(graph)
    results = [*graph.outputs, *graph.updates.values()]
    returned = set(results)
    used = [value.id for value in graph.stored() if value.users or value.id in returned]
    arguments = (*graph.inputs, *used)
    donation = donate(graph, donated, frozenset(zeros)) if donated else NOTHING
    namespace: dict[str, Any] = {}
    dead = _last_uses(graph, keep={*arguments, *results})
    zeroed = "".join(f"; v{value_id}.zero_()" for value_id in sorted(donation.zeroed))
    lines = ["def run(tensors):", f"    {_targets(arguments) or '()'} = tensors{zeroed}"]
    for node in graph.nodes:
        line = _node_line(graph, node, donation, namespace, torch.device(device))
        dropped = "".join(f"; del v{value_id}" for value_id in dead[node.id])
        lines.append(f"    {line}{dropped}")
    lines += _return_lines(graph, results, donated or {}, donation)
    exec(compile("\n".join(lines), _FILE, "exec"), namespace)
    return Program(arguments, tuple(graph.nodes), namespace["run"])


def _return_lines(
    graph: IRGraph, results: Sequence[int], donated: Mapping[int, int], donation: Donation
) -> Iterator[str]:
    """What is done after the last node: copies into donated arguments, and the return.

    A result that took an argument's place is returned as that argument, unless it is returned
    twice.
    """
    names = {value_id: f"v{value_id}" for value_id in results}
    for value_id in sorted(donation.clones):
        yield f"    r{value_id} = v{value_id}.clone()"
        names[value_id] = f"r{value_id}"
    yield from (f"    v{a}.copy_({names[result]})" for a, result in donation.copies.items())
    for argument, result in donated.items():
        if graph.values[argument].strides == graph.values[result].strides:
            names[result] = f"v{argument}"
    homes = set(donated.values())
    found = [
        f"{names[value_id]}.clone()"
        if value_id in homes.intersection(results[:k])
        else names[value_id]
        for k, value_id in enumerate(results)
    ]
    yield f"    return [{', '.join(found)}]"


def _targets(value_ids: Sequence[int | None]) -> str:
    return "".join("_, " if value_id is None else f"v{value_id}, " for value_id in value_ids)


def _node_line(
    graph: IRGraph,
    node: IRNode,
    donation: Donation,
    namespace: dict[str, Any],
    device: torch.device,
) -> str:
    """``v7 = f7(v1, v2, k7_0)``, or ``f7(v1, v2, k7_0); v7 = v1`` where the node runs in place."""
    form = donation.nodes.get(node.id)
    if form is not None:
        return _in_place_line(graph, node.id, form, namespace, device)
    overload = resolve(node.op)
    one, nested = signature(overload).returns_one, signature(overload).nested
    targets = f"v{node.outputs[0]}" if one else _targets(node.results) or "_"
    names = [_Name(f"v{value_id}") for value_id in node.inputs]
    call = _call(node.id, overload, names, node.attrs, namespace, device)
    if nested:
        namespace["flat"] = flatten_results
    return f"{targets} = flat({call})" if nested else f"{targets} = {call}"


def _in_place_line(
    graph: IRGraph,
    node_id: int,
    form: InPlace,
    namespace: dict[str, Any],
    device: torch.device,
) -> str:
    """``f7(v1, v2, k7_0); v7 = v1``, with clones in the place of what must stay as it is."""
    names = {i: _Name(f"{'c' if i in form.cloned else 'v'}{i}") for i in form.inputs}
    namespace["contiguous"] = torch.contiguous_format
    parts = []
    for output, place in form.written.items():
        if place in form.cloned:
            option = "" if graph.values[output].strides else "memory_format=contiguous"
            parts.append(f"c{place} = v{place}.clone({option})")
    inputs = [names[i] for i in form.inputs]
    parts.append(_call(node_id, form.overload, inputs, form.attrs, namespace, device))
    homes = form.written | form.untouched
    parts += [f"v{output} = {names[place]}" for output, place in homes.items()]
    parts += [f"del c{place}" for place in form.cloned]
    return "; ".join(parts)


def _call(
    node_id: int,
    overload: OpOverload,
    inputs: Sequence[_Name],
    attrs: dict[str, Any],
    namespace: dict[str, Any],
    device: torch.device,
) -> str:
    """``f7(v1, v2, k7_0)``, its function and constants filed in ``namespace``."""
    args, kwargs = join_call(overload, inputs, attrs, device)
    namespace[f"f{node_id}"] = callable_of(overload)
    constants = _Constants(namespace, f"k{node_id}_")
    parts = [constants.expression(value) for value in args]
    parts += [f"{name}={constants.expression(value)}" for name, value in kwargs.items()]
    return f"f{node_id}({', '.join(parts)})"


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
    return rebuild(graph.out_structure, run_flat(graph, tensors))


def run_flat(graph: IRGraph, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The graph's outputs, then its updates' new values, of inputs in order. Raises WeightError."""
    device = tensors[0].device if tensors else torch.device("cpu")
    program = compile_graph(graph, device)
    stored = [_contents(graph, value_id, device) for value_id in program.arguments[len(tensors) :]]
    return program([*tensors, *stored])


def check_input(value: IRValue, name: str, tensor: torch.Tensor) -> None:
    """Raise InputError where ``tensor`` is not of the shape and dtype of ``value``."""
    if tuple(tensor.shape) != value.shape or tensor.dtype != torch_dtype(value.dtype):
        raise InputError(
            f"input {name!r} is {describe_dtype(tensor.dtype)}{list(tensor.shape)}, but the graph "
            f"was captured for {value.dtype}{list(value.shape)}; shapes are static, so pass "
            "tensors of that shape or capture again"
        )


def _contents(graph: IRGraph, value_id: int, device: torch.device) -> torch.Tensor:
    value = graph.values[value_id]
    tensor = graph.tensors.get(value_id)
    if value.init == "zeros":
        return torch.zeros(value.shape, dtype=torch_dtype(value.dtype), device=device)
    if tensor is None or tensor.is_meta:
        raise WeightError(
            f"{value.role} {value.names[0]!r} has no contents (the model was built on the meta "
            "device); build a pipeline with weights=, or capture a model that holds them"
        )
    return tensor
