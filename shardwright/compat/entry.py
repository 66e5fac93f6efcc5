"""Seed 001's entry points: from a model to a file of partitions, in one call or in three.

    build_graph               capture, and see the model as layers
    partition_with_profiler   that, measure the layers, and put them in stages by METIS
    compile_partitioned_model write the stages down as Python
    pipe_model                all of it

Input: a model and an example of what it is called with. Output: a `LayerGraph`, which
`compile_partitioned_model` takes. Invariant: each is a few calls of the steps that have
names of their own: `capture`, `profile`, `metis_partition`, `codegen`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwright.codegenerate.codegen import codegen
from shardwright.costs import Layer, Profile
from shardwright.costs.granularity import BasicBlocks
from shardwright.errors import CodegenError, ProfileError
from shardwright.ir import IRGraph
from shardwright.ir.values import IRValue
from shardwright.planning.layer_graph import (
    LayerEdgeWeight,
    LayerGraph,
    LayerNode,
    LayerWeight,
    layer_graph,
)
from shardwright.planning.mesh_plan import plan_of_partition
from shardwright.planning.partitioners import metis_partition
from shardwright.profiling import profile
from shardwright.tracing import capture

DEPTH = 1000
"""Deeper than any model: layers are the modules that have no modules in them."""

Weights = Profile | Mapping[str, Layer | float]
"""What layers take: a profile, or measured layers by name."""


def pipe_model(
    model: nn.Module,
    sample_batch: Any,
    kwargs: Mapping[str, Any] | None = None,
    n_iter: int = 10,
    nparts: int = 2,
    depth: int = DEPTH,
    basic_blocks: BasicBlocks | None = None,
    partition_by_memory: bool = False,
    node_weight_function: LayerWeight | None = None,
    edge_weight_function: LayerEdgeWeight | None = None,
    output_file: str | Path | None = None,
    DEBUG: bool = False,
    **METIS_opt: int,
) -> LayerGraph:
    """Profile a model, partition its layers into ``nparts`` stages, and write them as Python.

    model, sample_batch, kwargs
        The model and the arguments of a call: ``sample_batch`` is one argument, or a tuple of them.
    n_iter
        Number of samples, of which the times of layers are medians.
    depth, basic_blocks
        A layer is a module at this depth, or one of these classes; 1000 is the full depth.
    partition_by_memory
        Stages of equal bytes instead of equal time, unless ``node_weight_function`` is given.
    node_weight_function, edge_weight_function
        The weight of a layer (`LayerNode`), and of the data between two layers: by default the
        measured milliseconds, forward and backward, and the bytes.
    output_file
        The file to write; see `compile_partitioned_model`.
    DEBUG
        Put each operator on a line of its own.
    METIS_opt
        METIS's own options: ``seed``, ``ufactor``, ….

    Returns the graph with its partition. Raises the errors of `capture`, `profile`,
    `metis_partition` and `codegen`.
    """
    graph = partition_with_profiler(
        model,
        sample_batch,
        kwargs,
        n_iter,
        nparts,
        depth,
        basic_blocks,
        node_weight_function or (by_memory if partition_by_memory else by_time),
        edge_weight_function,
        **METIS_opt,
    )
    compile_partitioned_model(graph, model, verbose=DEBUG, output_file=output_file)
    return graph


def partition_with_profiler(
    model: nn.Module,
    sample_batch: Any,
    kwargs: Mapping[str, Any] | None = None,
    n_iter: int = 10,
    nparts: int = 2,
    max_depth: int = DEPTH,
    basic_blocks: BasicBlocks | None = None,
    node_weight_function: LayerWeight | None = None,
    edge_weight_function: LayerEdgeWeight | None = None,
    **METIS_opt: int,
) -> LayerGraph:
    """Profile a model and partition its layers into stages, without writing a file.

    The parameters are those of `pipe_model`, whose ``depth`` is ``max_depth`` here. Raises
    CaptureError, ProfileError and PlanError.
    """
    graph = build_graph(
        model, sample_batch, kwargs, max_depth, basic_blocks, use_profiler=True, n_iter=n_iter
    )
    return metis_partition(
        graph,
        nparts,
        node_weight_function or by_time,
        edge_weight_function or by_bytes,
        **METIS_opt,
    )


def build_graph(
    model: nn.Module,
    sample_batch: Any,
    kwargs: Mapping[str, Any] | None = None,
    max_depth: int = DEPTH,
    basic_blocks: BasicBlocks | None = None,
    use_profiler: bool = False,
    n_iter: int = 10,
    weights: Weights | None = None,
) -> LayerGraph:
    """Capture a model as a graph of layers.

    use_profiler, n_iter
        Measure each layer, as `profile_network` does. Otherwise layers have the ``weights`` of
        their names, or None.
    weights
        Earlier measurements by name: layers of a profile, or milliseconds.

    Raises CaptureError and ProfileError.
    """
    args = sample_batch if isinstance(sample_batch, tuple) else (sample_batch,)
    graph = capture(model, args, kwargs)
    blocks = basic_blocks or ()
    if use_profiler:
        weights = profile(graph, depth=max_depth, basic_blocks=blocks, n_iter=n_iter)
    return layer_graph(
        graph,
        depth=max_depth,
        basic_blocks=blocks,
        weights=_layers(weights),
        costs=weights.costs() if isinstance(weights, Profile) else None,
    )


def _layers(weights: Weights | None) -> Iterable[Layer]:
    """What is known of layers. Raises ProfileError for what is no weight."""
    if weights is None or isinstance(weights, Profile):
        return weights.layers if weights is not None else ()
    if not isinstance(weights, Mapping):
        raise ProfileError(
            f"weights= is a {type(weights).__name__}; give a Profile, or what each layer takes by "
            "its name: milliseconds, or a layer of a profile"
        )
    return [_weight(name, weight) for name, weight in weights.items()]


def _weight(name: str, weight: Any) -> Layer:
    if isinstance(weight, Layer):
        return weight
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < inf:
        raise ProfileError(
            f"weights= has {weight!r} for {name!r}; expected milliseconds from 0 up, or a layer of "
            "a profile"
        )
    return Layer(name, "", (), name, float(weight), *[0.0] * 6)


def compile_partitioned_model(
    graph: LayerGraph,
    model: nn.Module | None = None,
    verbose: bool = False,
    output_file: str | Path | None = None,
) -> Path:
    """Write the stages of a partitioned graph as a Python file; return its path.

    graph
        The result of `pipe_model`, `partition_with_profiler` or `metis_partition`.
    model
        The model of the graph, which is checked against it.
    verbose
        Put each operator on a line of its own.
    output_file
        With or without ``.py``; by default the model's class and the number of stages, in the
        working directory: ``generated_GPT2LMHeadModel4.py``.

    Raises CodegenError if the graph has no stages or is of another model, and the errors of
    `codegen`.
    """
    if not isinstance(graph, LayerGraph) or graph.partition is None:
        found = "has no stages" if isinstance(graph, LayerGraph) else f"is {type(graph).__name__}"
        raise CodegenError(
            f"the graph {found}; give what pipe_model, partition_with_profiler or metis_partition "
            "of build_graph's result gives, or write a plan with codegen(plan, path, graph=graph)"
        )
    if model is not None:
        _check_model(graph.graph, model)
    path = _path(output_file, graph.graph.name, len(graph.partition.ranks))
    codegen(plan_of_partition(graph.graph, graph.partition), path, verbose, graph=graph.graph)
    return path


def _path(output_file: str | Path | None, name: str, stages: int) -> Path:
    path = Path(f"generated_{name}{stages}" if output_file is None else output_file)
    return path if path.suffix == ".py" else path.with_name(f"{path.name}.py")


def _check_model(graph: IRGraph, model: nn.Module) -> None:
    """Raise CodegenError where a graph stores parameters that a model has not."""
    held = dict(model.named_parameters(remove_duplicate=False))
    for value in graph.stored():
        if value.role == "param":
            _check_parameter(graph.name, value, type(model).__name__, held)


def _check_parameter(
    graph: str, value: IRValue, model: str, held: Mapping[str, torch.Tensor]
) -> None:
    name = value.names[0]
    found = f"has {list(held[name].shape)}" if name in held else "has none"
    if name not in held or tuple(held[name].shape) != value.shape:
        raise CodegenError(
            f"the graph {graph!r} stores the parameter {name!r} of shape {list(value.shape)}, the "
            f"{model} {found}; give the model that the graph was built of, or none"
        )


# --- weights --------------------------------------------------------------------------------------


def by_time(layer: LayerNode) -> float:
    """The milliseconds that a layer takes, forward and backward, as they were measured."""
    return layer.weight.forward_time + layer.weight.backward_time if layer.weight else 1.0


def by_memory(layer: LayerNode) -> float:
    """The bytes of what a layer stores and makes; what several layers store counts with the first.

    A training step keeps both: the one for the optimizer, the other for the backward.
    """
    own = [value for value in layer.stored if value.users[0] == _first_reader(layer, value)]
    return sum(value.nbytes for value in (*own, *layer.outputs))


def _first_reader(layer: LayerNode, value: IRValue) -> int | None:
    """The first node of a layer that reads a value."""
    reading = (node.node.id for node in layer.nodes if value.id in node.node.inputs)
    return next(reading, None)


def by_bytes(maker: LayerNode, reader: LayerNode) -> float:
    """The bytes that one layer makes and another reads."""
    read = {value.id for value in reader.inputs}
    return sum(value.nbytes for value in maker.outputs if value.id in read)


compile_partitoned_model: Callable[..., Path] = compile_partitioned_model
"""The seed's name."""
