"""The ends of a file's forward: what goes in, what comes out, and which buffers change.

Comes in: a file's forward as one graph (`file_graph`). Goes out: the same graph with its inputs,
outputs and updates, in the original's structure. What a training step adds up over microbatches
comes out as what one microbatch gives; what the forward does not make is None, and inputs that only
the rest of the step reads are none of it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from shardwright.codegenerate.sources.file_graph import (
    FORWARD,
    FileGraph,
    microbatch_shape,
    refusal,
    replacements,
)
from shardwright.codegenerate.sources.node_rules import Makers
from shardwright.codegenerate.sources.pruned_structure import pruned_arguments, pruned_result
from shardwright.errors import CodegenError
from shardwright.ir import IRGraph
from shardwright.ir.structure import Arguments, Leaf, Parameter, Tree, TupleTree
from shardwright.pipeline import Pipeline
from shardwright.pipeline.graphs import TaskGraphs


def with_ends(pipeline: Pipeline, joined: FileGraph) -> IRGraph:
    """The graph with its ends. Raises CodegenError where an output is cut over slots."""
    made = _outputs(pipeline, joined)
    if not made:
        raise CodegenError(
            f"the step {pipeline.name!r} returns nothing that its forward makes, so that nothing "
            "says what its loss is; return the loss, or generate code from the plan and the graph "
            "(codegen(plan, path, graph=graph))"
        )
    arguments, result = _structure(pipeline)
    inputs = _inputs(pipeline, joined, made.values())
    return replace(
        joined.graph,
        inputs=list(inputs.values()),
        outputs=list(made.values()),
        updates=_updates(pipeline, joined),
        in_structure=pruned_arguments(arguments, inputs),
        out_structure=pruned_result(result, made),
    )


def _inputs(pipeline: Pipeline, joined: FileGraph, returned: Collection[int]) -> dict[int, int]:
    """The inputs by their number among the file's: those that the forward reads, or nothing."""
    elsewhere = {piece.origin for piece in pipeline.metadata.tensor_slices.inputs.values()}
    return {
        number: value_id
        for number, (name, value_id) in enumerate(joined.inputs.items())
        if joined.graph.values[value_id].users or value_id in returned or name not in elsewhere
    }


def _outputs(pipeline: Pipeline, joined: FileGraph) -> dict[int, int]:
    """What the forward makes of the original outputs, by their numbers."""
    slices = pipeline.metadata.tensor_slices.outputs
    pieces: dict[str, list[str]] = {}
    for tensor, piece in slices.items():
        pieces.setdefault(piece.origin, []).append(tensor)
    makers = {v: node for node in joined.graph.nodes for v in node.outputs}
    graphs, found = TaskGraphs(pipeline), dict[int, int]()
    for name, origin in pipeline.metadata.tensors.outputs.items():
        tensor, *others = pieces[name]
        value_id = _made(pipeline, graphs, joined, tensor)
        if value_id is None:
            continue
        value_id = _of_one_microbatch(pipeline, joined, value_id, makers)
        shape = joined.graph.values[value_id].shape
        if others or shape != microbatch_shape(pipeline, name, origin):
            raise refusal(pipeline, f"cuts the output {name!r} over several slots")
        found[origin.idx] = value_id
    return dict(sorted(found.items()))


def _made(pipeline: Pipeline, graphs: TaskGraphs, joined: FileGraph, tensor: str) -> int | None:
    """The value of a tensor, if the forward makes it; tasks without nodes hand on what they get."""
    while tensor not in joined.values:
        name = next(iter(pipeline.connections.producers.get(tensor, ())), "")
        if not name or pipeline.supertasks[name].kind != "FX" or graphs.of(name).nodes:
            return None
        task, graph = pipeline.supertasks[name], graphs.of(name)
        tensor = task.inputs[graph.inputs.index(graph.outputs[task.outputs.index(tensor)])]
    return joined.values[tensor]


def _of_one_microbatch(pipeline: Pipeline, joined: FileGraph, value_id: int, makers: Makers) -> int:
    """What one microbatch gives to a sum over all of them; any other value as it is.

    A sum begins with zeros; the terms of a mean are divided by how many there are.
    """
    node = makers.get(value_id)
    if node is None or node.op != "aten.add.Tensor" or len(node.inputs) != 2:
        return value_id
    before, term = node.inputs
    if joined.graph.values[before].init is None:
        return value_id
    training, divided = pipeline.training, makers.get(term)
    assert training is not None
    assert training.microbatches is not None
    count = training.microbatches.n
    if divided and divided.op == "aten.div.Scalar" and divided.attrs["other"] == count:
        return divided.inputs[0]
    return term


def _updates(pipeline: Pipeline, joined: FileGraph) -> dict[int, int]:
    """The buffers that the forward changes, with their new contents."""
    makers = pipeline.connections.producers
    return {
        joined.values[old]: joined.values[new]
        for new, old in replacements(pipeline).items()
        if pipeline.supertasks[makers[new][0]].phase in FORWARD
        and pipeline.tensors[old].value is not None
        and old in joined.values
    }


def _structure(pipeline: Pipeline) -> tuple[Arguments, Tree]:
    """The structure of the original's call; flat tensors by their names where a file has none."""
    metadata = pipeline.metadata
    if metadata.structure is not None:
        return metadata.structure.inputs, metadata.structure.outputs
    given, made = (
        tuple(
            Leaf(name, i)
            for i, name in enumerate(sorted(tensors, key=lambda name: tensors[name].idx))
        )
        for tensors in (metadata.tensors.inputs, metadata.tensors.outputs)
    )
    arguments = (Parameter(leaf.name, "POSITIONAL_OR_KEYWORD", leaf) for leaf in given)
    return Arguments(tuple(arguments)), made[0] if len(made) == 1 else TupleTree(made)
