"""Batch norm with the statistics of each data shard, as data parallel training has it.

Along the axis ``data`` each slot normalizes the rows that it has by their own mean and variance,
without waiting for the others. That is another function of the batch than batch norm on one device,
so the graph has to say it: with D shards the rows are dealt into D groups whose channels stand side
by side, ``[B, C, …]`` as ``[B / D, D · C, …]``, and normalized as ``D · C`` channels. Split along
data a slot has one group, and what is left of it is batch norm of the slot's rows.

Running statistics are the mean over the shards of what each would have.
"""

from __future__ import annotations

from shardwright.dimops.call import Writer
from shardwright.ir import Builder, IRGraph, IRNode, IRValue

NORM = "aten._native_batch_norm_legit_functional.default"
"""Batch norm that makes new running statistics: inputs are x, maybe weight and bias, mean, var."""


def has_shards(graph: IRGraph, node: IRNode, batch: int, shards: int) -> bool:
    """Whether a node is batch norm of a batch that divides by so many shards."""
    if node.op != NORM or not node.attrs["training"] or shards == 1:
        return False
    rows = graph.values[node.inputs[0]].shape[0]
    statistics = (graph.values[value_id] for value_id in node.outputs[1:3])
    unread = not any(value.users for value in statistics)
    return unread and batch > 0 and rows % batch == 0 and batch % shards == 0


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


def _spread(e: Writer, value: IRValue, shards: int) -> IRValue:
    """A value a channel, for the channels of all shards."""
    width = value.shape[0]
    row = e.call("aten.unsqueeze.default", value, 0)
    rows = e.call("aten.expand.default", row, [shards, width])
    return e.call("aten.reshape.default", rows, [shards * width])  # type: ignore[no-any-return]
