"""`codegen`: from a plan and its graph to a Python file with a module a partition.

A partition is a stage of the plan. Where a plan names no stages, it is what one slot does, or as
much of it as can be done before it needs another's. Lookup tables that a pipeline's plan cuts over
all slots are whole where they are first read, which the program's notes say. A training step's
forward is what `compile_ir` saw, not what a plan makes of it for several microbatches at once: a
mean over labels is the mean over the batch that is given. Dropout is torch's again, which draws
from torch's random numbers.
"""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

from ruff.__main__ import find_ruff_bin

from shardwright.atomic import replacing
from shardwright.codegenerate.splitting.stages import cut, split_stages
from shardwright.codegenerate.stages import EndNames, StageProgram, partition_numbers
from shardwright.codegenerate.writing.file import file_text
from shardwright.codegenerate.writing.names import WIDTH, read_again
from shardwright.errors import CodegenError
from shardwright.ir import IRGraph, IRNode
from shardwright.ir.dropout import DROPOUT
from shardwright.pipeline import Pipeline
from shardwright.planning.assemble import planned
from shardwright.planning.plan import (
    Plan,
    assignments,
    check_belongs,
    cluster_of,
    label_of,
)
from shardwright.planning.step import as_step
from shardwright.planning.step_graph import forward_view
from shardwright.planning.unfuse import unfuse

_OPTIONS = ("--isolated", "--target-version", "py311", "--line-length", str(WIDTH))
_FIXES = ("check", "--select", "I,F401", "--fix-only", "--quiet")
_SECONDS = 120


def formatted(text: str) -> str:
    """The text as ruff formats it. Raises CodegenError where it is no Python or cannot be run."""
    for command in (_FIXES, ("format",)):
        try:
            done = subprocess.run(
                [find_ruff_bin(), *command, *_OPTIONS, "--no-cache", "-"],
                input=text,
                capture_output=True,
                encoding="utf-8",
                timeout=_SECONDS,
                check=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            said = getattr(error, "stderr", None) or str(error)
            raise CodegenError(
                f"the generated code could not be formatted: {said.strip()}; it is written with "
                "ruff 0.11 or later, which is installed with shardwright (pip install 'ruff>=0.11')"
            ) from error
        text = done.stdout
    return text


def codegen(
    pipeline_or_plan: Pipeline | Plan,
    path: str | Path,
    verbose: bool = False,
    graph: IRGraph | None = None,
) -> Path:
    """Write the partitions of a model as a Python file that imports only torch; return its path.

    Each partition is a class ``Stage0(nn.Module)`` with the model's modules of that partition,
    under their original names. ``create_pipeline_configuration(model)`` in the file creates them
    all.

    pipeline_or_plan
        A plan together with its ``graph``, or a pipeline that was built in this process.
    path
        The file to write. It is written completely or not at all.
    verbose
        Put each operator on a line of its own instead of nesting those that are read once.
    graph
        The graph that the plan was made for.

    Raises CodegenError if an operation of a partition has no Python form or cannot be formatted,
    PlanError if the plan is for another graph, WriteError if the file cannot be written.
    """
    target = Path(path)
    read_again()
    text = formatted(file_text(program_of(pipeline_or_plan, graph), verbose=verbose))
    with replacing(target) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return target


def program_of(source: Pipeline | Plan, graph: IRGraph | None = None) -> StageProgram:
    """The partitions of a plan, or of the plan that a pipeline was built from.

    Raises CodegenError where code cannot be generated, PlanError where the graph is another.
    """
    if isinstance(source, Plan):
        if graph is None:
            raise CodegenError(
                f"the plan for {source.graph!r} says where nodes run and not what they do; give "
                "the graph that it was made for, too (graph=graph)"
            )
        return program_of_plan(graph, source)
    if not isinstance(source, Pipeline):
        raise CodegenError(
            f"code is generated from a Pipeline or a Plan, found a {type(source).__name__}"
        )
    if source.origin is None or not isinstance(source.origin.plan, Plan):
        raise CodegenError(
            "a pipeline from a file has tasks of devices, not the model's modules; save the plan, "
            "too, and give codegen the plan and the graph: codegen(plan, path, graph=graph)"
        )
    if graph is not None:
        check_belongs(source.origin.plan, graph)
    return program_of_plan(source.origin.graph, source.origin.plan)


# --- partitions of a plan -------------------------------------------------------------------------


def _step_program(graph: IRGraph, plan: Plan) -> StageProgram:
    """The forward of a step as a model, with the stages of its plan. Raises PlanError."""
    assert plan.training is not None
    apart = unfuse(graph, plan.unfused)
    step = as_step(apart, plan.training.microbatches)
    stages = [plan.training.stages[written - 1] for written in step.written]
    view = replace(forward_view(apart), next_id=apart.next_id)
    loss = next(node for node in apart.nodes if node.op == "Backward").inputs[0]
    model, ends = _as_model(apart, _with_torch_dropout(view), loss)
    return cut(model, stages, training=True, ends=ends)


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


def _as_model(step: IRGraph, view: IRGraph, loss: int) -> tuple[IRGraph, EndNames]:
    """The forward of a step with ends of its own, and their names.

    What the step returns of it is returned, the loss in front where it is not among that; a loss
    that is returned detached is returned as it is. Inputs that only the rest of the step reads are
    none of it.
    """
    names = EndNames.of(step)
    read = {value_id for node in view.nodes for value_id in node.inputs} | {*step.outputs}
    everywhere = {value_id for node in step.nodes for value_id in node.inputs}
    pairs = zip(step.inputs, names.inputs, strict=True)
    inputs = {v: name for v, name in pairs if v in read or v not in everywhere}
    detached = {v: loss for node in step.nodes if _detaches(node, loss) for v in node.outputs}
    returned = ((detached.get(v, v), n) for v, n in zip(step.outputs, names.outputs, strict=True))
    outputs = [(value_id, name) for value_id, name in returned if value_id in view.values]
    if all(value_id != loss for value_id, _ in outputs):
        outputs.insert(0, (loss, "loss"))
    model = replace(view, inputs=list(inputs), outputs=[value_id for value_id, _ in outputs])
    return model, EndNames([*inputs.values()], [name for _, name in outputs])


def _detaches(node: IRNode, loss: int) -> bool:
    return node.op == "aten.detach.default" and node.inputs == [loss]


def program_of_plan(graph: IRGraph, plan: Plan) -> StageProgram:
    """The partitions of a model or of a training step's forward.

    Raises PlanError where the plan is for another graph, CodegenError where it splits nodes of a
    training step, or where a partition needs what a later one makes.
    """
    check_belongs(plan, graph)
    if plan.training is not None:
        _check_whole(plan)
        return _step_program(graph, plan)
    whole = planned(graph, plan)
    assigned = list(assignments(plan, len(whole.nodes)))
    training = graph.training is True
    if is_split(plan):
        return split_stages(
            whole,
            assigned,
            cluster_of(plan),
            stages=plan.stages,
            training=training,
            notes=plan.notes,
        )
    devices = [assignment.mesh.devices for assignment in assigned]
    numbers = plan.stages or partition_numbers(
        whole, [None if several else device for device, *several in devices]
    )
    notes = [
        f"{label_of(node)}: cut over {', '.join(several)} in the plan, whole in partition {number} "
        "here"
        for node, several, number in zip(whole.nodes, devices, numbers, strict=True)
        if several[1:]
    ]
    return cut(whole, numbers, training=training, notes=notes)


def is_split(plan: Plan) -> bool:
    """Whether nodes are split over slots that do nothing by themselves."""
    sets = [assignment.mesh.devices for assignment in plan.assignments]
    alone = {devices[0] for devices in sets if len(devices) == 1}
    return any(len(devices) > 1 and not alone.issuperset(devices) for devices in sets)


def _check_whole(plan: Plan) -> None:
    """Raise CodegenError where the plan of a training step splits nodes."""
    if is_split(plan):
        split = next(a.mesh for a in plan.assignments if len(a.mesh.devices) > 1)
        raise CodegenError(
            f"the plan for the training step {plan.graph!r} splits nodes over the mesh {split}, "
            "and code is written for split models: capture the model (sw.capture), plan it alike, "
            "and write the step around it"
        )
