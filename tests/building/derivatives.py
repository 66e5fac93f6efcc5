"""Graphs with their backward, run beside autograd on the same tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from shardwright.autodiff.differentiate import Differentiator
from shardwright.autodiff.vjp import Vjps
from shardwright.ir import Builder, IRGraph, IRValue
from shardwright.ir.execute import compile_graph
from shardwright.ir.operators import join_call, resolve
from shardwright.ir.tensor_meta import strides_or_none, torch_dtype


class Differentiated(NamedTuple):
    """A graph that takes the gradients of ``gets`` behind its inputs, and gives those of ``wants``
    that there are behind its outputs."""

    graph: IRGraph
    present: list[bool]
    differentiator: Differentiator


def copied(graph: IRGraph) -> tuple[Builder, dict[int, int]]:
    """A builder that holds what ``graph`` holds, and its values' ids there."""
    builder = Builder(graph.name)
    mapping = {v: builder.copy_value(graph, graph.values[v]).id for v in graph.inputs}
    mapping |= {value.id: builder.copy_value(graph, value).id for value in graph.stored()}
    for node in graph.nodes:
        builder.copy_node(graph, node, mapping)
    return builder, mapping


def with_gradients(
    graph: IRGraph,
    wants: Sequence[int],
    seeds: Sequence[tuple[int, torch.Tensor]],
    vjps: Vjps | None = None,
) -> Differentiated:
    """Differentiate a graph; ``seeds`` are values and tensors like their gradients."""
    builder, mapping = copied(graph)
    differentiator = Differentiator(builder, vjps)
    grads = {mapping[v]: _seed(builder, graph.values[v], like) for v, like in seeds}
    wanted = [mapping[v] for v in wants]
    found = differentiator.backward(list(builder.graph.nodes), grads, wanted)
    differentiator.exchange()
    outputs = [mapping[v] for v in graph.outputs]
    present = [found[v].id for v in wanted if v in found]
    updates = {mapping[old]: mapping[new] for old, new in graph.updates.items()}
    finished = builder.finish([*outputs, *present], updates=updates)
    return Differentiated(finished, [v in found for v in wanted], differentiator)


def _seed(builder: Builder, value: IRValue, like: torch.Tensor) -> IRValue:
    return builder.input("seed", value.shape, value.dtype, strides=like.stride())


def run(graph: IRGraph, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs of a graph; stored values have their contents."""
    program = compile_graph(graph)
    stored = [graph.tensors[v] for v in program.arguments[len(tensors) :]]
    with torch.no_grad():
        return program([*tensors, *stored])


def wrong_kinds(graph: IRGraph, tensors: Sequence[torch.Tensor]) -> list[str]:
    """The nodes that make other shapes, dtypes or strides than the graph says."""
    found = dict(zip(graph.inputs, tensors, strict=True)) | dict(graph.tensors)
    wrong = []
    for node in graph.nodes:
        given = [found[v] for v in node.inputs]
        args, kwargs = join_call(resolve(node.op), given, node.attrs, torch.device("cpu"))
        with torch.no_grad():
            made = resolve(node.op)(*args, **kwargs)
        listed = made if isinstance(made, (tuple, list)) else [made]
        for value_id, tensor in zip(node.results, listed, strict=True):
            if value_id is not None:
                found[value_id] = tensor
                value = graph.values[value_id]
                if _kind_of_value(value) != _kind_of_tensor(tensor):
                    wrong.append(f"{node.op}: {_kind_of_tensor(tensor)}, {_kind_of_value(value)}")
            elif isinstance(tensor, torch.Tensor):
                wrong.append(f"{node.op} returns a tensor at an absent place")
    return wrong


def _kind_of_value(value: IRValue) -> object:
    return value.shape, torch_dtype(value.dtype), _where_it_counts(value.shape, value.strides)


def _kind_of_tensor(tensor: torch.Tensor) -> object:
    shape = tuple(tensor.shape)
    strides = strides_or_none(shape, tensor.stride())
    return shape, tensor.dtype, _where_it_counts(shape, strides)


def _where_it_counts(
    shape: tuple[int, ...], strides: tuple[int, ...] | None
) -> tuple[int | None, ...] | None:
    """Strides without those of dimensions of size 1."""
    if strides is None:
        return None
    return tuple(s if size > 1 else None for size, s in zip(shape, strides, strict=True))


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """``max|a - b| / max|b|``."""
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    if expected.numel() == 0:
        return 0.0
    scale = float(expected.abs().max())
    return float((found - expected).abs().max()) / (scale or 1.0)
