"""From a graph and a plan of it to a Program.

What always holds: a partition is a stage of the plan. Where a plan names no stages, it is what one
slot does, or as much of it as can be done before it needs another's (`numbering`). Lookup tables
that a pipeline's plan cuts over all slots stand whole where they are first read, which the
program's notes say. Of a training step the program is the forward (`forward_step`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from shardwright.codegenerate.sources.cutting import cut
from shardwright.codegenerate.sources.forward_step import forward_of
from shardwright.codegenerate.sources.numbering import partition_numbers
from shardwright.codegenerate.splitting.split_stages import split_stages
from shardwright.codegenerate.stage import Program
from shardwright.errors import CodegenError
from shardwright.ir import IRGraph, IRNode
from shardwright.planning.assemble import planned
from shardwright.planning.plan import (
    Assignment,
    Plan,
    assignments,
    check_belongs,
    cluster_of,
    label_of,
)


def program_of_plan(graph: IRGraph, plan: Plan) -> Program:
    """The partitions of a model or of a training step's forward.

    Raises PlanError where the plan is for another graph, CodegenError where it splits nodes of a
    training step, or where a partition needs what a later one makes.
    """
    check_belongs(plan, graph)
    if is_split(plan):
        return _split_program(graph, plan)
    if plan.training is not None:
        forward = forward_of(graph, plan)
        mode = _captured_in_training(forward.graph, otherwise=True)
        return cut(forward.graph, forward.stages, training=mode, loss=forward.loss)
    whole = planned(graph, plan)
    assigned = list(assignments(plan, len(whole.nodes)))
    places = [_place(assignment) for assignment in assigned]
    numbers = plan.stages or partition_numbers(whole, places)
    return cut(
        whole,
        numbers,
        training=_captured_in_training(graph),
        notes=_whole_notes(whole, places, assigned, numbers),
    )


def is_split(plan: Plan) -> bool:
    """Whether nodes are split over slots that do nothing by themselves."""
    sets = [assignment.mesh.devices for assignment in plan.assignments]
    alone = {devices[0] for devices in sets if len(devices) == 1}
    return any(len(devices) > 1 and not alone.issuperset(devices) for devices in sets)


def _split_program(graph: IRGraph, plan: Plan) -> Program:
    """The partitions of a model whose nodes are split over slots."""
    if plan.training is not None:
        split = next(a.mesh for a in plan.assignments if len(a.mesh.devices) > 1)
        raise CodegenError(
            f"the plan for the training step {plan.graph!r} splits nodes over the mesh {split}, "
            "and code is written for split models: capture the model (sw.capture), plan it alike, "
            "and write the step around it"
        )
    whole = planned(graph, plan)
    return split_stages(
        whole,
        list(assignments(plan, len(whole.nodes))),
        cluster_of(plan),
        stages=plan.stages,
        training=_captured_in_training(graph),
        notes=plan.notes,
    )


def _place(assignment: Assignment) -> Hashable | None:
    """The slot of a node; None where all slots do a part of it."""
    devices = assignment.mesh.devices
    return devices[0] if len(devices) == 1 else None


def _whole_notes(
    graph: IRGraph,
    places: Sequence[Hashable | None],
    assigned: Sequence[Assignment],
    numbers: Sequence[int],
) -> list[str]:
    """What the plan cuts over slots, and where it stands whole."""
    rows = zip(graph.nodes, places, assigned, numbers, strict=True)
    return [
        f"{label_of(node)}: cut over {', '.join(assignment.mesh.devices)} in the plan, whole in "
        f"partition {number} here"
        for node, place, assignment, number in rows
        if place is None
    ]


# --- the mode of the model -----------------------------------------------------------------------

Attributes = Mapping[str, Any]

_FLAGS: dict[str, Callable[[Attributes], bool | None]] = {
    "aten.dropout.default": lambda attrs: attrs["train"],
    "aten.feature_dropout.default": lambda attrs: attrs["train"],
    "aten.alpha_dropout.default": lambda attrs: attrs["train"],
    "aten.feature_alpha_dropout.default": lambda attrs: attrs["train"],
    "aten.native_dropout.default": lambda attrs: attrs["train"],
    "aten.batch_norm.default": lambda attrs: attrs["training"],
    "aten.instance_norm.default": lambda attrs: attrs["use_input_stats"] or None,
    "aten._native_batch_norm_legit_functional.default": lambda attrs: attrs["training"],
    "aten.rrelu.default": lambda attrs: attrs["training"],
    "aten.scaled_dot_product_attention.default": lambda attrs: attrs["dropout_p"] > 0 or None,
}
"""What a call says of the mode; None where it says nothing."""

_LAYERS = "torch.nn.modules."


def _captured_in_training(graph: IRGraph, *, otherwise: bool = False) -> bool:
    """Whether a graph is that of a model in training mode; ``otherwise`` where nothing says so.

    Where no capture says it, it follows from operators that do one thing in training and another in
    evaluation: layers of torch.nn first, then calls of functions, whose flag most models set to it.
    """
    if graph.training is not None:
        return graph.training
    said = [(node, flag) for node in graph.nodes if (flag := _flag(node)) is not None]
    layers = [flag for node, flag in said if node.scope_class.startswith(_LAYERS)]
    flags = layers or [flag for _, flag in said]
    return any(flags) if flags else otherwise


def _flag(node: IRNode) -> bool | None:
    found = _FLAGS.get(node.op)
    return None if found is None else found(node.attrs)
