"""From a graph and a plan to a Pipeline.

The planned graph is written out as one graph a slot (`localize`, `step` for a training step), cut
in tasks (`segments`), and put into the file's form (`assembly`), with the metadata that the
Generator needs (`originals`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import shardwright.pipeline as pl
from shardwright.building.assembly import DocumentWriter
from shardwright.building.localize import localize
from shardwright.building.recompute import recompute
from shardwright.building.segments import tasks
from shardwright.building.slots import Localized
from shardwright.building.update import localize_step
from shardwright.building.weights import NoContents, Originals, Rename, WeightSource
from shardwright.errors import PlanError
from shardwright.ir import IRGraph
from shardwright.pipeline.check_schedule import schedule_info
from shardwright.pipeline.check_tensors import are_parts, stored_wholes
from shardwright.planning.assemble import planned, step_of
from shardwright.planning.plan import Plan, TrainingPlan, check_belongs
from shardwright.schedules import Schedule, make_schedule

FORMAT_VERSION = 1


def build(
    graph: IRGraph,
    plan: Plan,
    weights: str | Path | None = None,
    rename: Rename = None,
    *,
    device_kind: Literal["cpu", "cuda", "npu"] = "cpu",
) -> pl.Pipeline:
    """The pipeline that runs ``graph`` as ``plan`` says, checked.

    ``weights`` is a safetensors file, the index of a sharded one, or the folder of either, that the
    pipeline shall read its parameters from; without it they are carried along and written beside
    the file.
    ``rename`` takes the model's parameter names to the file's. ``device_kind`` is the kind of
    every slot, ``cpu`` or ``cuda``; a training step is differentiated for it.
    Raises PlanError where the plan is for another graph, WeightError, PipelineError, and
    GraphError where an operator of a training step has no gradient, or the graph is none
    (`IRGraph.check`).
    """
    graph.check()
    pipeline = written(graph, plan, WeightSource(graph, weights, rename), device_kind)
    pl.check(pipeline)
    return pipeline


def written(
    graph: IRGraph,
    plan: Plan,
    source: WeightSource,
    device_kind: Literal["cpu", "cuda", "npu"] = "cpu",
) -> pl.Pipeline:
    """The pipeline whose weights a source finds, not checked yet."""
    check_belongs(plan, graph)
    originals, localized = _on_slots(graph, plan, device_kind)
    assembly = DocumentWriter(
        originals, localized, source, _first_stages(plan.training), device_kind
    )
    found = tasks(localized, weights_apart=_splits_backward(plan.training))
    assembly.add_inputs(found)
    for task in found:
        assembly.add(task)
    assembly.add_outputs()
    assembly.add_updates()
    _promise_wholes(assembly.tensors)
    slots = {
        device: pl.Device(kind=device_kind, idx=index) for index, device in enumerate(plan.devices)
    }
    pipeline = _finish(graph.name, assembly, slots, _training(assembly, plan))
    pipeline.weights = source.carried
    pipeline.origin = pl.Origin(graph, plan)
    return pipeline


def without_weights(graph: IRGraph, plan: Plan) -> pl.Pipeline:
    """The pipeline that nobody runs: not checked, its stored values without contents."""
    return written(graph, plan, NoContents(graph))


def _promise_wholes(tensors: Mapping[str, pl.TensorInfo]) -> None:
    """Leave the whole's shape out where a program uses some of a stored tensor only."""
    for values in stored_wholes(tensors).values():
        parts = {value.placements: value.shape for value in values.values()}
        if not are_parts([*parts], next(iter(parts.values()))):
            for value in values.values():
                value.shape = None


def _on_slots(graph: IRGraph, plan: Plan, device_kind: str) -> tuple[Originals, Localized]:
    """What the slots do, and what it begins and ends with."""
    if plan.training is None:
        whole = planned(graph, plan)
        return Originals(whole), localize(whole, plan)
    step = step_of(graph, plan)
    originals = Originals.of_step(step, plan.training.microbatches)
    return originals, recompute(localize_step(step, plan, device_kind), plan.training)


def _splits_backward(training: TrainingPlan | None) -> bool:
    """Whether weight gradients are made after what others wait for.

    They are where the schedule has work of its own for them; else where a rank that waits for its
    gradients gets them sooner, unless that would hold what is computed again for so long.
    """
    if training is None:
        return False
    waits = len(training.slots) > 1 and training.recompute == "none"
    return waits or _schedule(training).splits_backward


def _schedule(training: TrainingPlan) -> Schedule:
    return make_schedule(
        training.schedule,
        ranks=len(training.slots),
        microbatches=training.microbatches,
        chunks=training.chunks,
    )


def _first_stages(training: TrainingPlan | None) -> dict[str, int]:
    """The first virtual stage of each slot of a training step."""
    if training is None:
        return {}
    return {
        device: training.placement.index(rank)
        for rank, devices in enumerate(training.slots)
        for device in devices
    }


def _finish(
    name: str,
    assembly: DocumentWriter,
    devices: dict[str, pl.Device],
    training: pl.Training | None,
) -> pl.Pipeline:
    """The file, with equal graphs shared."""
    idle = devices.keys() - {task.device for task in assembly.tasks.values()}
    if idle:
        raise PlanError(
            f"the plan gives {', '.join(sorted(idle))} nothing to do: what stands there is split "
            "nowhere, so other slots do it as well, or no output needs it; plan for fewer slots"
        )
    ends = assembly.inputs, assembly.outputs
    blobs = assembly.share_graphs()
    return pl.Pipeline(
        name=name,
        devices=devices,
        tensors=assembly.tensors,
        supertasks={
            "input": pl.SuperTask(kind="input", inputs=(), outputs=tuple(assembly.inputs)),
            **assembly.tasks,
            "output": pl.SuperTask(kind="output", inputs=tuple(assembly.outputs), outputs=()),
        },
        metadata=assembly.originals.metadata(*ends),
        version=FORMAT_VERSION,
        blobs=blobs or None,
        training=training,
        requires=assembly.requires() or None,
    )


def _training(assembly: DocumentWriter, plan: Plan) -> pl.Training | None:
    """Replacements, and for a training step how often tasks run."""
    if plan.training is None:
        return pl.Training(assembly.replaces) if assembly.replaces else None
    return pl.Training(
        replaces=assembly.replaces,
        microbatches=assembly.originals.cut(),
        schedule=schedule_info(_schedule(plan.training), plan.training.slots),
        notes=plan.notes,
    )
