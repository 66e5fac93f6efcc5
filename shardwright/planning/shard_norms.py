"""Batch norm where the batch is split: statistics of each data shard, or of all of them.

`nn.BatchNorm` is what data parallel training has it: along the axis ``data`` each slot normalizes
the rows that it has by their own mean and variance, without waiting for the others. That is another
function of the batch than batch norm on one device, so the graph has to say it: with D shards the
rows are dealt into D groups whose channels stand side by side, ``[B, C, …]`` as
``[B / D, D · C, …]``, and normalized as ``D · C`` channels. Split along data a slot has one group,
and what is left of it is batch norm of the slot's rows.

Running statistics are the mean over the shards of what each would have.

`nn.SyncBatchNorm` has the statistics of all rows. It is written as sums of the channels, which are
reduced over the shards, and so are the sums that its backward makes of them: two vectors of the
channels each way, and no activations.
"""

from __future__ import annotations

from shardwright.ir import Builder, IRGraph, IRNode, IRValue
from shardwright.ir.tensor_meta import torch_dtype
from shardwright.ops.call import Writer

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
