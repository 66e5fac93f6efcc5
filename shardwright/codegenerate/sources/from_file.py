"""From a pipeline file to a Program.

Comes in: a pipeline whose slots are the stages of one model, and if need be its graph. Goes out:
the partitions: the virtual stages of a training step, else what each slot does, or as much of it
as can be done before it needs another's. What always holds: the partitions compute what the file's
forward computes, of one microbatch where the file is of a training step.

A file is written for a run, and some of that is taken back: tables that are cut over all slots are
whole again, as are operators of which a part is differentiated; means over labels are means again,
sums over microbatches are left out, dropout is torch's. A file knows neither modules nor source
lines; modules follow from the names of parameters, or both from the graph, where it is given.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from shardwright.codegenerate.sources.captured_mode import captured_in_training
from shardwright.codegenerate.sources.carried_origins import with_origins_of
from shardwright.codegenerate.sources.cutting import cut
from shardwright.codegenerate.sources.file_ends import with_ends
from shardwright.codegenerate.sources.file_graph import FileGraph, file_graph, refusal
from shardwright.codegenerate.sources.inferred_scopes import with_inferred_scopes
from shardwright.codegenerate.sources.node_rules import (
    MeanLosses,
    composed,
    cross_entropy,
    torch_dropout,
    whole_table,
    with_nodes,
    with_rule,
)
from shardwright.codegenerate.sources.numbering import partition_numbers
from shardwright.codegenerate.stage import Program
from shardwright.ir import IRGraph, IRNode
from shardwright.ir.dtypes import torch_dtype
from shardwright.pipeline import Pipeline
from shardwright.tracing.dead_code import live_values


def program_of_file(pipeline: Pipeline, known: IRGraph | None = None) -> Program:
    """The partitions of a file; ``known`` is the graph that its modules and lines are taken from.

    Raises CodegenError where tasks are lowered, where nodes or inputs are split over slots, or
    where ``known`` is the graph of something else.
    """
    joined = file_graph(pipeline)
    joined = joined._replace(graph=with_rule(joined.graph, torch_dropout))
    graph = with_ends(pipeline, joined)
    for rule in (composed, cross_entropy, MeanLosses(joined.once), whole_table):
        graph = with_rule(graph, rule)
    graph = _with_whole_values(pipeline, graph)
    nodes, places = _live(pipeline, joined, graph)
    graph = with_inferred_scopes(with_nodes(graph, nodes))
    if known is not None:
        graph = with_origins_of(graph, known)
    training = pipeline.training is not None and pipeline.training.schedule is not None
    return cut(
        graph,
        partition_numbers(graph, places),
        training=captured_in_training(graph, otherwise=training),
        loss=_loss(graph) if training else None,
    )


def _with_whole_values(pipeline: Pipeline, graph: IRGraph) -> IRGraph:
    """The graph in which stored values that are all of a tensor have its name, no placements.

    Values of one graph have names of their own: one that was joined of parts has a number behind.
    """
    sizes: dict[str, tuple[int, ...]] = {}
    for info in pipeline.tensors.values():
        if info.value is not None:
            ends = info.value.shape or tuple(end for _, end in info.value.placements)
            before = sizes.get(info.value.name, ends)
            sizes[info.value.name] = tuple(map(max, ends, before))
    values = {
        value_id: replace(value, name=value.names[0], placements=None)
        if value.is_stored and value.names and value.shape == sizes.get(value.names[0])
        else value
        for value_id, value in graph.values.items()
    }
    return replace(graph, values=values)


def _live(
    pipeline: Pipeline, joined: FileGraph, graph: IRGraph
) -> tuple[list[IRNode], list[Hashable | None]]:
    """The nodes that something needs, and their places. Raises CodegenError for parts of wholes."""
    needed = live_values(graph, (*graph.outputs, *graph.updates.values()))
    part = next((v for v in graph.stored() if v.id in needed and v.placements is not None), None)
    if part is not None:
        raise refusal(pipeline, f"has {part.names[0]!r} in parts")
    pairs = list(joined.placed(graph))
    live = [(node, place) for node, place in pairs if not needed.isdisjoint(node.outputs)]
    training = pipeline.training
    cut_in = training.microbatches.n if training and training.microbatches else 1
    if cut_in > 1 and any(node.id in joined.once for node, _ in live):
        raise refusal(pipeline, "needs numbers of the whole batch in each microbatch")
    return [node for node, _ in live], [place for _, place in live]


def _loss(graph: IRGraph) -> int | None:
    """The one output that is a floating-point number; a file does not say what is the loss."""
    values = (graph.values[value_id] for value_id in dict.fromkeys(graph.outputs))
    numbers = [v.id for v in values if not v.shape and torch_dtype(v.dtype).is_floating_point]
    return numbers[0] if len(numbers) == 1 else None
