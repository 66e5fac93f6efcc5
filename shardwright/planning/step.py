"""What a plan and a build see of a training step: its forward, made ready to be cut.

Input: a step graph (`compile_ir`) and the number of microbatches. Output: a `PreparedStep`,
whose graph computes the same and is in one order: nodes that are done once a step (``prepare``),
the forward, and then the markers with what reads them. What the program does behind its backward
that does not need it stands in the forward.

The mean over labels that may be ignored becomes a quotient: the sum of all rows' losses, and the
number of labels that count (`counts`). Parts of a batch have sums that add up, where their means do
not. The number is that of the whole batch, made before the first microbatch from inputs of the
whole batch, and it is divided by the number of microbatches, since each weighs as much as any
other in the step. Plain means over equal microbatches need nothing.

Batch norm has the statistics of a microbatch, and where the batch is split over data shards, those
of each shard, unless it is a SyncBatchNorm.

Invariant: the same graph and numbers give the same `PreparedStep`, ids included.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from shardwright.errors import PlanError
from shardwright.ir import Builder, IRGraph, IRNode, IRValue
from shardwright.ir.graph import forward_nodes
from shardwright.ir.operators import MERGES
from shardwright.ir.tensor_meta import torch_dtype
from shardwright.ops.call import Writer
from shardwright.planning.counts import Counts, is_mean_loss
from shardwright.planning.follow import Sharded, SplitPropagation
from shardwright.planning.rules import batch_dims, batch_rows, batched_outputs, follow_batch
from shardwright.planning.step_graph import forward_view


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


def with_prepared(forward: IRGraph, stages: Sequence[int]) -> list[int]:
    """The stage of each node, from those of the last nodes: first is what is done once a step."""
    prepared = len(forward.nodes) - len(stages)
    stages = [0] * prepared + list(stages)
    position = {node.id: i for i, node in enumerate(forward.nodes)}
    for i in reversed(range(prepared)):
        users = (user for v in forward.nodes[i].outputs for user in forward.values[v].users)
        stages[i] = min((stages[position[user]] for user in users), default=0)
    return stages


# --- batch norms ----------------------------------------------------------------------------------
#
# `nn.BatchNorm` is what data parallel training has it: along the axis ``data`` each slot normalizes
# the rows that it has by their own mean and variance, without waiting for the others. That is
# another function of the batch than batch norm on one device, so the graph has to say it: with D
# shards the rows are in D groups whose channels stand side by side, ``[B, C, …]`` as ``[B / D, D ·
# C, …]``, and normalized as ``D · C`` channels. Split along data a slot has one group, which is
# batch norm of the slot's rows. Running statistics are the mean over the shards of what each would
# have.
#
# `nn.SyncBatchNorm` has the statistics of all rows. It is written as sums of the channels, which
# are reduced over the shards, and so are the sums that its backward makes of them: two vectors of
# the channels each way, and no activations.


NORM = "aten._native_batch_norm_legit_functional.default"
"""Batch norm that makes new running statistics: inputs are x, maybe weight and bias, mean, var."""
SYNCHRONIZED = "torch.nn.modules.batchnorm.SyncBatchNorm"
"""The module class that asks for the statistics of all shards, as under DistributedDataParallel."""
HALF = ("f16", "bf16")
"""Their statistics are computed in the dtype of the running ones."""


def has_shards(graph: IRGraph, node: IRNode, batch: int, shards: int) -> bool:
    """Whether a node is batch norm of a batch that divides by so many shards."""
    if not _is_written_by_rows(graph, node, shards) or node.scope_class == SYNCHRONIZED:
        return False
    rows = graph.values[node.inputs[0]].shape[0]
    return batch > 0 and rows % batch == 0 and batch % shards == 0


def is_synchronized(graph: IRGraph, node: IRNode, shards: int) -> bool:
    """Whether a node is batch norm with the statistics of all of several shards."""
    return _is_written_by_rows(graph, node, shards) and node.scope_class == SYNCHRONIZED


def normalizes_batch(node: IRNode) -> bool:
    """Whether a node is batch norm by the statistics of the rows that it has."""
    return node.op == NORM and node.attrs["training"] is True


def _is_written_by_rows(graph: IRGraph, node: IRNode, shards: int) -> bool:
    """Whether a node is batch norm of a split batch, of which only the result is read."""
    if not normalizes_batch(node) or shards == 1:
        return False
    return not any(graph.values[value_id].users for value_id in node.outputs[1:3])


def write_by_shards(
    builder: Builder, graph: IRGraph, node: IRNode, mapping: dict[int, int], shards: int
) -> None:
    """Write the norm of each shard in place of a batch norm; ``mapping`` grows."""
    e = Writer(builder, node.scopes, node.source)
    x, *channels = (builder.graph.values[mapping[value_id]] for value_id in node.inputs)
    rows, width, *places = x.shape
    y = e.call("aten.reshape.default", x, [shards, rows // shards, width, *places])
    y = e.call("aten.transpose.int", y, 0, 1)
    y = e.call("aten.reshape.default", y, [rows // shards, shards * width, *places])
    spread = [_spread(e, value, shards) for value in channels]
    y, _, _, *running = e.emit(node.op, [y, *spread], node.attrs)
    y = e.call("aten.reshape.default", y, [rows // shards, shards, width, *places])
    y = e.call("aten.transpose.int", y, 0, 1)
    y = e.call("aten.reshape.default", y, [rows, width, *places])
    means = []
    for value in running:
        each = e.call("aten.reshape.default", value, [shards, width])
        means.append(e.call("aten.mean.dim", each, [0]))
    made = (node.outputs[0], *node.outputs[3:])
    mapping |= {old: new.id for old, new in zip(made, (y, *means), strict=True)}


def write_synchronized(
    builder: Builder, graph: IRGraph, node: IRNode, mapping: dict[int, int]
) -> None:
    """Write a batch norm as sums over its rows; ``mapping`` grows."""
    e = Writer(builder, node.scopes, node.source)
    x, *affine, mean, var = (builder.graph.values[mapping[value_id]] for value_id in node.inputs)
    dims = [dim for dim in range(len(x.shape)) if dim != 1]
    count, dtype = x.numel // x.shape[1], x.dtype
    wide = mean.dtype if x.dtype in HALF else x.dtype
    if wide != dtype:
        x = e.call("aten.to.dtype", x, torch_dtype(wide))

    def per_channel(value: IRValue) -> IRValue:
        shape = [value.shape[0], *[1] * (len(x.shape) - 2)]
        return e.call("aten.reshape.default", value, shape)  # type: ignore[no-any-return]

    def average(value: IRValue) -> IRValue:
        total = e.call("aten.sum.dim_IntList", value, dims)
        return e.call("aten.div.Scalar", total, count)  # type: ignore[no-any-return]

    def updated(old: IRValue, new: IRValue) -> IRValue:
        momentum = node.attrs["momentum"]
        kept = e.call("aten.mul.Scalar", old, 1 - momentum)
        if new.dtype != old.dtype:
            new = e.call("aten.to.dtype", new, torch_dtype(old.dtype))
        added = e.call("aten.mul.Scalar", new, momentum)
        return e.call("aten.add.Tensor", kept, added)  # type: ignore[no-any-return]

    center = average(x)
    y = e.call("aten.sub.Tensor", x, per_channel(center))
    spread = average(e.call("aten.mul.Tensor", y, y))
    scale = e.call("aten.rsqrt.default", e.call("aten.add.Scalar", spread, node.attrs["eps"]))
    y = e.call("aten.mul.Tensor", y, per_channel(scale))
    for op, value in zip(("aten.mul.Tensor", "aten.add.Tensor"), affine, strict=False):
        y = e.call(op, y, per_channel(value))
    if y.dtype != dtype:
        y = e.call("aten.to.dtype", y, torch_dtype(dtype))
    unbiased = e.call("aten.mul.Scalar", spread, count / max(count - 1, 1))
    made = (y, updated(mean, center), updated(var, unbiased))
    written = (node.outputs[0], *node.outputs[3:])
    mapping |= {old: new.id for old, new in zip(written, made, strict=True)}


def _spread(e: Writer, value: IRValue, shards: int) -> IRValue:
    """A value a channel, for the channels of all shards."""
    width = value.shape[0]
    row = e.call("aten.unsqueeze.default", value, 0)
    rows = e.call("aten.expand.default", row, [shards, width])
    return e.call("aten.reshape.default", rows, [shards * width])  # type: ignore[no-any-return]


# --- what mixes the batch -------------------------------------------------------------------------
#
# The statistics of a batch norm, a contrastive loss, the balance of a mixture's experts are made
# from all rows of a batch. Cut in microbatches, each microbatch has its own; that is no error (it
# is what one device does with those microbatches, and what GPipe does), but a plan notes it.
#
# The batch's dimension is followed from the inputs by dimension annotations. An operator mixes
# where it reads that dimension whole, or reads a sum over it in which it is not linear. Means of
# losses do not count, as they become quotients of sums over the whole batch (`counts`). Where a
# microbatch is one row annotations know nothing of its dimension, and batch norm is known by its
# name.


FEW = 8
"""How many operators a note lists."""


def mixing_notes(forward: IRGraph, microbatches: int, shards: int) -> list[str]:
    """Notes that name the operators that mix the batch, where it is cut."""
    if shards * microbatches == 1:
        return []
    walk, alone = _MixingWalk(follow_batch(forward, 1)), batch_rows(forward) == 1
    found = [n for n in forward.nodes if walk.mixes(n) or (alone and normalizes_batch(n))]
    mixing = [node for node in found if node.op not in MERGES]
    notes = []
    if reshaping := [node for node in found if node.op in MERGES]:
        notes.append(f"reshape a batch so that its rows cannot be followed: {_listed(reshaping)}")
    if microbatches > 1 and mixing:
        notes.append(f"mix the rows of a batch, so have each microbatch's alone: {_listed(mixing)}")
    norms = [node for node in mixing if has_shards(forward, node, batch_rows(forward), shards)]
    if norms:
        notes.append(
            "have the statistics of each data shard's rows, and the mean of the shards' running "
            f"statistics: {_listed(norms)}"
        )
    return notes


def _listed(nodes: Sequence[IRNode]) -> str:
    """The nodes' operators and modules, the first few of them."""
    names = [f"{_name(node)}{f' in {node.scope}' if node.scope else ''}" for node in nodes]
    distinct = list(dict.fromkeys(names))
    return ", ".join([*distinct[:FEW], *(["…"] if len(distinct) > FEW else [])])


def _name(node: IRNode) -> str:
    return node.op.split(".")[1].removeprefix("_native_").removesuffix("_legit_functional")


@dataclass(slots=True)
class _MixingWalk:
    """Goes through the nodes of a graph that was split by batch, in their order."""

    following: SplitPropagation
    sums: set[int] = field(default_factory=set)
    """Values that are sums over the batch, or linear in such."""

    def mixes(self, node: IRNode) -> bool:
        """Whether a node makes of several rows what is no sum over them."""
        following = self.following
        if is_mean_loss(node):
            self.sums.update(node.outputs)
            return False
        bound, chosen = following.bound(node), following.chosen.get(node.id)
        sums = {i for i, value_id in enumerate(node.inputs) if value_id in self.sums}
        if sums:
            linear = bound is not None and any(sums <= {*inputs} for inputs in bound.linear)
            self.sums.update(node.outputs if linear else ())
            return not linear
        if bound is not None and chosen is not None:
            carries = zip(node.outputs, bound.flow(chosen[0]).outputs, strict=True)
            self.sums.update(value_id for value_id, carry in carries if carry.kind == "partial")
            return False
        rows = (isinstance(following.state(value_id), Sharded) for value_id in node.inputs)
        return bound is not None and any(rows)
