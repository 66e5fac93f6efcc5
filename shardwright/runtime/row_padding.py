"""Calls with fewer rows than a pipeline was captured with: padded, run, and cut.

In comes a pipeline and a call whose inputs have fewer rows; out comes which dimension of each
output has their rows, if every operator maps row i to row i. That is followed from these inputs by
dimension annotations, in the graph that the pipeline's tasks make, not believed of the file. Where
an operator mixes rows, or has no annotation, the call is refused, and the operator named.

What always holds: rows that pad are copies of the last one, so that indices are valid and nothing
is infinite that was not; they change no other row, and nobody sees them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardwright.codegenerate.sources.file_graph import file_graph
from shardwright.errors import CodegenError, InputError
from shardwright.ir import IRGraph, IRNode
from shardwright.pipeline import MetadataTensor, Pipeline
from shardwright.planning.follow import Annotations, identifier_at


class ShortBatch(NamedTuple):
    """A call with fewer rows: how many, of how many, and which inputs have them, along dim 0."""

    rows: int
    size: int
    inputs: frozenset[str]

    def pad(self, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The call's tensors with copies of the last row up to the size."""
        missing = self.size - self.rows
        return {
            name: torch.cat([tensor, tensor[-1:].expand(missing, *tensor.shape[1:])])
            if name in self.inputs
            else tensor
            for name, tensor in whole.items()
        }

    def cut(self, outputs: Mapping[str, Tensor], dims: Mapping[str, int]) -> dict[str, Tensor]:
        """What the rows given make, of outputs by the original's names, along ``dims``."""
        found = dict(outputs)
        for name, dim in dims.items():
            size = outputs[name].shape[dim] // self.size * self.rows
            found[name] = outputs[name].narrow(dim, 0, size)
        return found


def short_batch(pipeline: Pipeline, whole: Mapping[str, Tensor]) -> ShortBatch | None:
    """What a call with other shapes lacks, where that is as many rows of some inputs."""
    expected = pipeline.metadata.tensors.inputs
    shapes = {name: (tuple(tensor.shape), expected[name].shape) for name, tensor in whole.items()}
    other = {name: pair for name, pair in shapes.items() if pair[0] != pair[1]}
    sizes = {(found[:1], size[:1]) for found, size in other.values() if found[1:] == size[1:]}
    if len(sizes) != 1 or any(found[1:] != size[1:] for found, size in other.values()):
        return None
    ((found, size),) = sizes
    if not found or not size or not 0 < found[0] < size[0]:
        return None
    return ShortBatch(found[0], size[0], frozenset(other))


def row_dims(pipeline: Pipeline, batch: ShortBatch) -> dict[str, int]:
    """Along which dimension each output has the rows of the inputs that a call cuts short.

    An output without rows is not there; one may have several elements a row, next to each other.
    Raises InputError where something mixes the rows.
    """
    graph, inputs, outputs = _whole_graph(pipeline)
    dims = {inputs[name]: 0 for name in batch.inputs}
    annotations = Annotations(graph)
    for node in graph.nodes:
        read = {i: dims[value] for i, value in enumerate(node.inputs) if value in dims}
        if read:
            dims |= _made_rows(annotations, node, read, batch.size)
    if changed := [graph.values[old].name for old, new in graph.updates.items() if new in dims]:
        raise InputError(f"the buffer {changed[0]!r} is made from all rows")
    return {name: dims[value] for name, value in outputs.items() if value in dims}


def _made_rows(
    annotations: Annotations, node: IRNode, read: Mapping[int, int], size: int
) -> dict[int, int]:
    """The dimension of the rows in what a node makes. Raises InputError where it mixes them."""
    bound = annotations.of(node)
    if bound is None:
        raise InputError(f"{_place(node)} has no dimension annotation, so it may mix the rows")
    names = {identifier_at(bound, i, dim) for i, dim in read.items()}
    name = names.pop()
    if names or name is None or bound.length(name) % size:
        raise InputError(f"{_place(node)} mixes the rows of the batch")
    flow = bound.flow(name)
    agree = all((flow.inputs[i].kind, flow.inputs[i].dim) == ("shard", d) for i, d in read.items())
    if not agree or any(carry.kind != "shard" for carry in flow.outputs):
        raise InputError(f"{_place(node)} mixes the rows of the batch")
    found = zip(node.outputs, flow.outputs, strict=True)
    return {value: carry.dim for value, carry in found if carry.dim is not None}


def _place(node: IRNode) -> str:
    return f"{node.op.split('.')[1]}{f' in {node.scope}' if node.scope else ''}"


def _whole_graph(pipeline: Pipeline) -> tuple[IRGraph, dict[str, int], dict[str, int]]:
    """What a pipeline computes, and the values of its original inputs and outputs by name.

    Raises InputError where its tasks do not tell.
    """
    originals, origin = pipeline.metadata.tensors, pipeline.origin
    if origin is not None:
        graph = origin.graph
        return (
            graph,
            _by_place(originals.inputs, graph.inputs),
            _by_place(originals.outputs, graph.outputs),
        )
    try:
        found = file_graph(pipeline)
    except CodegenError:
        raise InputError(
            "the file's tasks are split over devices or lowered, and do not tell whether its rows "
            "are independent"
        ) from None
    slices = pipeline.metadata.tensor_slices.outputs
    made = {piece.origin: found.values[name] for name, piece in slices.items()}
    return found.graph, found.inputs, made


def _by_place(originals: Mapping[str, MetadataTensor], values: Sequence[int]) -> dict[str, int]:
    """The values of a graph's inputs or outputs by name."""
    names = sorted(originals, key=lambda name: originals[name].idx)
    return dict(zip(names, values, strict=True))
