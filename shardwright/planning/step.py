"""What a plan and a build see of a training step: its forward, made ready to be cut.

Comes in: a step graph (`compile_ir`) and the number of microbatches. Goes out: a `PreparedStep`,
whose graph computes the same and is in one order: nodes that are done once a step (``prepare``),
the forward, and then the markers with what reads them. What the program does behind its backward
that does not need it stands in the forward.

The mean over labels that may be ignored becomes a quotient: the sum of all rows' losses, and the
number of labels that count (`counts`). Parts of a batch have sums that add up, where their means do
not. The number is that of the whole batch, made before the first microbatch from inputs of the
whole batch, and it is divided by the number of microbatches, since each weighs as much as any
other in the step. Plain means over equal microbatches need nothing.

Batch norm has the statistics of a microbatch, and where the batch is split over data shards, those
of each shard, unless it is a SyncBatchNorm (`shard_norms`).

What always holds: the same graph and numbers give the same `PreparedStep`, ids included.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from shardwright.errors import PlanError
from shardwright.ir import Builder, IRGraph, IRNode
from shardwright.ir.graph import forward_nodes
from shardwright.planning.batch import batch_dims, batch_rows, batched_outputs
from shardwright.planning.counts import Counts, is_mean_over_labels
from shardwright.planning.forward import forward_view
from shardwright.planning.shard_norms import (
    has_shards,
    is_synchronized,
    write_by_shards,
    write_synchronized,
)


@dataclass(frozen=True)
class PreparedStep:
    """A training step in the order in which it is cut.

    graph
        Prepare nodes, forward nodes, markers and what reads them. Inputs of the whole batch are
        values of role ``input`` that are not among its inputs.
    forward
        How many leading nodes are prepare and forward nodes.
    prepare
        The positions of the nodes that run once a step.
    whole
        Input of the whole batch to the input that is a microbatch of it, by value id.
    dims
        Along which dimension microbatches lie, for the inputs and outputs that have one.
    written
        For each node of the captured forward, in order, how many nodes there are up to the last
        one that is written for it.
    """

    graph: IRGraph
    forward: int
    prepare: frozenset[int]
    whole: Mapping[int, int]
    dims: Mapping[int, int]
    written: tuple[int, ...] = ()

    @cached_property
    def view(self) -> IRGraph:
        """The forward by itself."""
        return forward_view(self.graph)


def as_step(graph: IRGraph, microbatches: int, shards: int = 1) -> PreparedStep:
    """The step of a graph whose batch comes in microbatches, each split over data shards.

    Raises PlanError where there is not one backward for all of it, or where the labels of a mean
    are counted only as the microbatches come.
    """
    check_one_backward(graph)
    return _StepWriter(graph, microbatches, shards).run()


def check_one_backward(graph: IRGraph) -> None:
    """Raise PlanError where a step differentiates more than once, or adds to what it had."""
    found = [node for node in graph.nodes if node.op == "Backward"]
    if len(found) != 1:
        raise PlanError(
            f"the step {graph.name!r} calls backward {len(found)} times; write it for one "
            "microbatch, with one backward, and give plan(…, microbatches=n)"
        )


def has_quotients(graph: IRGraph) -> bool:
    """Whether the number of microbatches changes a step: it has a mean over labels."""
    return any(is_mean_over_labels(graph, node) for node in forward_nodes(graph))


def is_mixed_by_shards(graph: IRGraph, shards: int) -> bool:
    """Whether the number of data shards changes a step: batch norms have each their own."""
    rows = batch_rows(graph) if shards > 1 else 0
    return rows > 0 and any(
        has_shards(graph, node, rows, shards) or is_synchronized(graph, node, shards)
        for node in forward_nodes(graph)
    )


class _StepWriter:
    """A step graph written again; `run` gives it."""

    def __init__(self, graph: IRGraph, microbatches: int, shards: int) -> None:
        self.graph = graph
        self.shards = shards
        self.builder = Builder(graph.name)
        self.mapping: dict[int, int] = {}
        for value in (*(graph.values[v] for v in graph.inputs), *graph.stored()):
            self.mapping[value.id] = self.builder.copy_value(graph, value).id
        self.rows = batch_rows(graph)
        self.counts = Counts(graph, self.builder, self.mapping, batch_dims(graph), microbatches)

    def run(self) -> PreparedStep:
        forward = forward_nodes(self.graph)
        for node in forward:
            self.counts.prepare(node)
        prepared = len(self.builder.graph.nodes)
        written = []
        for node in forward:
            self._write(node)
            written.append(len(self.builder.graph.nodes))
        for node in self._others(forward):
            self.builder.copy_node(self.graph, node, self.mapping)
        graph, whole = self._finish()
        return PreparedStep(
            graph,
            written[-1] if written else prepared,
            frozenset(range(prepared)),
            whole,
            batch_dims(graph) | batched_outputs(graph),
            tuple(written),
        )

    def _write(self, node: IRNode) -> None:
        if has_shards(self.graph, node, self.rows, self.shards):
            write_by_shards(self.builder, self.graph, node, self.mapping, self.shards)
        elif is_synchronized(self.graph, node, self.shards):
            write_synchronized(self.builder, self.graph, node, self.mapping)
        elif not self.counts.write(node):
            self.builder.copy_node(self.graph, node, self.mapping)

    def _others(self, forward: list[IRNode]) -> Iterator[IRNode]:
        taken = {node.id for node in forward}
        return (node for node in self.graph.nodes if node.id not in taken)

    def _finish(self) -> tuple[IRGraph, dict[int, int]]:
        """The graph with the inputs of the original, and which microbatch each other input has."""
        graph, mapping = self.graph, self.mapping
        made = self.builder.finish(
            [mapping[value_id] for value_id in graph.outputs],
            out_structure=graph.out_structure,
            updates={mapping[old]: mapping[new] for old, new in graph.updates.items()},
        )
        count = len(graph.inputs)
        origins = (graph.inputs.index(value_id) for value_id in self.counts.whole_inputs)
        whole = dict(zip(made.inputs[count:], map(made.inputs.__getitem__, origins), strict=True))
        made.inputs = made.inputs[:count]
        made.in_structure = graph.in_structure
        return made, whole
