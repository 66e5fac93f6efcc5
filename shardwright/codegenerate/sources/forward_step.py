"""The forward of a training step as a model that gives the loss.

Comes in: a step's graph and its plan. Goes out: the graph of the forward as the program wrote it,
for a batch of the captured size, and the stage of each of its nodes. What always holds: it is what
`compile_ir` saw, not what a plan makes of it for several microbatches at once: a mean over labels
is the mean over the batch that is given, as it is in the program. Dropout is torch's again, which
draws from torch's random numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec

from shardwright.ir import IRGraph, IRNode
from shardwright.ir.dropout import DROPOUT
from shardwright.ir.structure import (
    Arguments,
    Fixed,
    FixedFloat,
    Leaf,
    Parameter,
    Tree,
    TupleTree,
    leaves,
)
from shardwright.planning.copies import with_copies
from shardwright.planning.plan import Copy, Plan
from shardwright.planning.step import as_step
from shardwright.planning.step_graph import forward_view
from shardwright.planning.unfuse import unfuse


class Forward(NamedTuple):
    """The forward, the stage of each node, and the value that the step differentiates."""

    graph: IRGraph
    stages: list[int]
    loss: int


def forward_of(graph: IRGraph, plan: Plan) -> Forward:
    """The forward of a step, with the stages of its plan. Raises PlanError."""
    assert plan.training is not None
    apart = unfuse(graph, plan.unfused)
    step = as_step(apart, plan.training.microbatches)
    stages = _without_copies(plan.training.stages, plan.copies)
    own = {written - 1: at for at, written in enumerate(step.written)}
    copies = [Copy(own[copy.node], copy.stage) for copy in plan.copies if copy.node in own]
    view = replace(forward_view(apart), next_id=apart.next_id)
    view, found = with_copies(view, copies, [stages[at] for at in own])
    loss = next(node for node in apart.nodes if node.op == "Backward").inputs[0]
    return Forward(as_model(apart, _with_torch_dropout(view), loss), found, loss)


def _with_torch_dropout(graph: IRGraph) -> IRGraph:
    """The graph with torch's dropout, which draws from torch's random numbers."""
    nodes = [
        replace(
            node,
            op="aten.dropout.default",
            inputs=node.inputs[:1],
            attrs={"p": node.attrs["p"], "train": True},
        )
        if node.op == DROPOUT
        else node
        for node in graph.nodes
    ]
    users: dict[int, list[int]] = {value_id: [] for value_id in graph.values}
    for node in nodes:
        for value_id in dict.fromkeys(node.inputs):
            users[value_id].append(node.id)
    values = {v: replace(value, users=users[v]) for v, value in graph.values.items()}
    return replace(graph, values=values, nodes=nodes)


def _without_copies(stages: Sequence[int], copies: Sequence[Copy]) -> list[int]:
    """The stages of the nodes that are no copies, which stand right behind the originals."""
    counts: dict[int, int] = {}
    for copy in copies:
        counts[copy.node] = counts.get(copy.node, 0) + 1
    found: list[int] = []
    at = 0
    while at < len(stages):
        found.append(stages[at])
        at += 1 + counts.get(len(found) - 1, 0)
    return found


def as_model(step: IRGraph, view: IRGraph, loss: int) -> IRGraph:
    """The forward of a step with ends of its own.

    What the step returns of it is returned, in the step's structure, the loss in front where it
    is not among that; a loss that is returned detached is returned as it is. Inputs that only the
    rest of the step reads are none of it.
    """
    assert step.in_structure is not None
    assert step.out_structure is not None
    read = {value_id for node in view.nodes for value_id in node.inputs} | {*step.outputs}
    everywhere = {value_id for node in step.nodes for value_id in node.inputs}
    inputs = {v: i for i, v in enumerate(step.inputs) if v in read or v not in everywhere}
    detached = {v: loss for node in step.nodes if _detaches(node, loss) for v in node.outputs}
    returned_values = enumerate(detached.get(v, v) for v in step.outputs)
    outputs = [(i, v) for i, v in returned_values if v in view.values]
    returned: Tree = _pruned_result(step.out_structure, [i for i, _ in outputs])
    if all(value_id != loss for _, value_id in outputs):
        returned = _with_loss(returned, len(outputs))
        outputs.insert(0, (-1, loss))
    return replace(
        view,
        inputs=list(inputs),
        outputs=[value_id for _, value_id in outputs],
        in_structure=_pruned_arguments(step.in_structure, list(inputs.values())),
        out_structure=returned,
    )


def _detaches(node: IRNode, loss: int) -> bool:
    return node.op == "aten.detach.default" and node.inputs == [loss]


def _with_loss(returned: Tree, count: int) -> Tree:
    """The loss, then what is returned, if that is anything."""
    if not count:
        return Leaf("loss", 0)
    behind = _pruned_result(returned, range(count), first=1)
    return TupleTree((Leaf("loss", 0), behind))


# --- structures without the leaves that are not kept ---------------------------------------------


def _pruned_result(tree: Tree, kept: Iterable[int], first: int = 0) -> Tree:
    """The tree with the leaves of these numbers, which count from ``first`` on."""
    return _pruned(tree, {old: new for new, old in enumerate(kept, first)})


def _pruned_arguments(arguments: Arguments, kept: Iterable[int]) -> Arguments:
    """The arguments with the tensors of these numbers."""
    numbers = {old: new for new, old in enumerate(kept)}
    return Arguments(tuple(_pruned_parameter(p, numbers) for p in arguments.parameters))


def _pruned_parameter(parameter: Parameter, numbers: Mapping[int, int]) -> Parameter:
    if parameter.value is None:
        return parameter
    before = [leaf.index for leaf in leaves(parameter.value)]
    if before and numbers.keys().isdisjoint(before):
        return Parameter(parameter.name, parameter.kind)
    value = _pruned(parameter.value, numbers)
    return Parameter(parameter.name, parameter.kind, value)


def _pruned(tree: Tree, numbers: Mapping[int, int]) -> Tree:
    if isinstance(tree, Leaf):
        return Leaf(tree.name, numbers[tree.index]) if tree.index in numbers else Fixed(None)
    if isinstance(tree, Fixed | FixedFloat):
        return tree
    items = tuple(_pruned(item, numbers) for item in tree.items)
    return msgspec.structs.replace(tree, items=items)
