"""From a graph and a plan to a Pipeline.

The planned graph is written out as one graph a slot (`localize`, `update` for a training step), cut
in tasks (`segments`), and put into the file's form (`DocumentWriter`), with the metadata that the
Generator needs (`weights`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import overload

import msgspec

import shardwright.pipeline as pl
from shardwright.building.localize import localize
from shardwright.building.recompute import recompute
from shardwright.building.segments import CommunicationSegment, ComputeSegment, Task, tasks
from shardwright.building.slots import Localized, LocalSlice, PhaseStage
from shardwright.building.update import localize_step
from shardwright.building.weights import NoContents, Originals, Rename, WeightSource, slice_of
from shardwright.devices import DeviceKind
from shardwright.errors import PlanError
from shardwright.ir import Builder, IRGraph, IRValue
from shardwright.ir.dynamic import Sizes
from shardwright.ir.operators import is_built_in
from shardwright.ir.tensor_meta import is_dense, sent_strides
from shardwright.pipeline.check_schedule import schedule_info
from shardwright.pipeline.check_tensors import are_parts, stored_wholes
from shardwright.pipeline.fxtext import encode, encode_part
from shardwright.pipeline.graphs import restated
from shardwright.pipeline.rules import MICROBATCH_PHASES
from shardwright.planning.assemble import planned, step_of
from shardwright.planning.like import plan_beside
from shardwright.planning.plan import Plan, TrainingPlan, check_belongs
from shardwright.planning.rules import batch_rows
from shardwright.schedules import Schedule, make_schedule
from shardwright.tracing.padding import padded_rows
from shardwright.tracing.program_set import ProgramSet

FORMAT_VERSION = 1


@overload
def build(
    graph: IRGraph,
    plan: Plan,
    weights: str | Path | None = None,
    rename: Rename = None,
    *,
    device_kind: DeviceKind = "cpu",
) -> pl.Pipeline: ...


@overload
def build(
    graph: ProgramSet,
    plan: Plan,
    weights: str | Path | None = None,
    rename: Rename = None,
    *,
    device_kind: DeviceKind = "cpu",
) -> pl.Bundle: ...


def build(
    graph: IRGraph | ProgramSet,
    plan: Plan,
    weights: str | Path | None = None,
    rename: Rename = None,
    *,
    device_kind: DeviceKind = "cpu",
) -> pl.Pipeline | pl.Bundle:
    """Build and check the pipeline that runs ``graph`` according to ``plan``.

    weights
        A safetensors file, the index of a sharded checkpoint, or the folder of either, from which
        the pipeline reads its parameters. By default it refers to the parameters in memory, which
        `Pipeline.save` writes next to the file.
    rename
        From the model's parameter names to the file's.
    device_kind
        The kind of every device, ``cpu`` or ``cuda``. A training step is differentiated for it.

    Of a `ProgramSet` it is a `Bundle`: a pipeline for each of its graphs and, once there is a call
    for others, for these. All have their parameters where ``plan`` puts those of the first graph.

    Raises PlanError if the plan is for another graph, WeightError, PipelineError, and GraphError if
    an operator of a training step has no gradient or the graph is invalid (`IRGraph.check`).
    """
    if isinstance(graph, ProgramSet):
        return _bundle(graph, plan, weights, rename, device_kind)
    graph.check()
    pipeline = written(graph, plan, WeightSource(graph, weights, rename), device_kind)
    pl.check(pipeline)
    return pipeline


def _bundle(
    programs: ProgramSet,
    plan: Plan,
    weights: str | Path | None,
    rename: Rename,
    device_kind: DeviceKind,
) -> pl.Bundle:
    def grow(sizes: Sizes) -> tuple[pl.Pipeline, Sizes]:
        graph = programs.at(**sizes)
        beside = plan if graph is programs.first else plan_beside(graph, programs.first, plan)
        pipeline = build(graph, beside, weights, rename, device_kind=device_kind)
        return pipeline, programs.least[tuple(sizes.values())]

    names = [*programs.shapes.sizes]
    made = {key: grow(dict(zip(names, key, strict=True))) for key in [*programs.graphs]}
    pipelines = {key: pipeline for key, (pipeline, _) in made.items()}
    return pl.Bundle(programs.shapes, pipelines, programs.least, grow)


def written(
    graph: IRGraph,
    plan: Plan,
    source: WeightSource,
    device_kind: DeviceKind = "cpu",
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
    pipeline.origin = pl.Origin(graph, plan, cache(partial(padded_rows, graph)))
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


# --- tensors and tasks of the file ----------------------------------------------------------------


@dataclass
class DocumentWriter:
    """Tensors and tasks, as far as they have been added."""

    originals: Originals
    localized: Localized
    weights: WeightSource
    stages: Mapping[str, int] = field(default_factory=dict)
    """In a training step, the first stage of each slot."""
    kind: DeviceKind = "cpu"
    """The kind of every slot."""
    tensors: dict[str, pl.TensorInfo] = field(default_factory=dict)
    tasks: dict[str, pl.SuperTask] = field(default_factory=dict)
    names: dict[tuple[str, int], str] = field(default_factory=dict)
    """The tensor of each value of a slot."""
    makers: dict[str, str] = field(default_factory=dict)
    """The task that makes a tensor."""
    inputs: dict[str, pl.MetadataTensorSlice] = field(default_factory=dict)
    outputs: dict[str, pl.MetadataTensorSlice] = field(default_factory=dict)
    replaces: dict[str, str] = field(default_factory=dict)
    strides: dict[str, tuple[int, ...] | None] = field(default_factory=dict)
    """How a tensor lies that a segment makes, also where its entry leaves that out."""
    operators: set[str] = field(default_factory=set)
    """Those that the tasks' graphs call."""
    groups: int = 0
    batched: set[tuple[str, int]] = field(init=False)
    """The slots' values that are slices of a microbatch's inputs."""

    def __post_init__(self) -> None:
        self.batched = {
            (part.device, part.value)
            for value_id, parts in self.localized.inputs.items()
            if value_id in self.originals.dims
            for part in parts
        }

    # --- tensors ------------------------------------------------------------------------------

    def tensor(self, device: str, value_id: int, placeholder: str = "") -> str:
        """The tensor of a slot's value, declared at its first use.

        ``placeholder`` is its name in the graph that uses it here.
        """
        key = (device, value_id)
        if key not in self.names:
            value = self.localized.slots[device].value(value_id)
            self.names[key] = self._declare(value.name, device, value, placeholder)
        return self.names[key]

    def _declare(self, wanted: str, device: str, value: IRValue, placeholder: str | None) -> str:
        """A tensor of a value's kind: ``wanted``, or ``wanted@slot`` where that is taken.

        Without a placeholder it is a produced one, whatever the value is.
        """
        name = wanted if wanted not in self.tensors else f"{wanted}@{device}"
        while name in self.tensors:
            name += "'"
        info = pl.TensorInfo(
            shape=value.shape,
            dtype=value.dtype,  # type: ignore[arg-type]
            strides=_in_one_piece(value)
            if value.is_stored
            else sent_strides(value.shape, value.strides),
        )
        if placeholder is not None and value.init is not None:
            info.init, info.origin = value.init, self.weights.origin(value)
        elif placeholder is not None and value.is_stored:
            info.value = self.weights.locate(value, placeholder)
        self.tensors[name] = info
        return name

    # --- tasks --------------------------------------------------------------------------------

    def add(self, task: Task) -> None:
        """A segment or a communication."""
        if isinstance(task, ComputeSegment):
            self._add_segment(task)
        else:
            self._add_meeting(task)

    def _add_segment(self, segment: ComputeSegment) -> None:
        """A compute task."""
        device = segment.device
        graph = self.localized.slots[device].builder.graph
        self.operators.update(node.op for node in segment.nodes)
        data = encode_part(graph, segment.nodes, segment.inputs, segment.outputs)
        inputs = tuple(self.tensor(device, v, f"i{i}") for i, v in enumerate(segment.inputs))
        text = restated(data, [self._lying(name) for name in inputs], self.kind)
        task = pl.SuperTask(
            kind="FX",
            inputs=inputs,
            outputs=tuple(self.tensor(device, v) for v in segment.outputs),
            device=device,
            data=text.data,
        )
        for name, strides in zip(task.outputs, text.strides, strict=True):
            info = self.tensors[name]
            info.strides = sent_strides(info.shape, strides)
            self.strides[name] = strides
        self._add(segment.name, task, segment.place)

    def _lying(self, name: str) -> pl.TensorInfo:
        """A tensor's entry, with its strides as they are on the slot that makes it."""
        info = self.tensors[name]
        return msgspec.structs.replace(info, strides=self.strides.get(name, info.strides))

    def _add_meeting(self, meeting: CommunicationSegment) -> None:
        """A task for each member of a communication, all in one group."""
        group = f"g{self.groups}"
        self.groups += 1
        communication = meeting.communication
        message = communication.kind == "send"
        members = zip(communication.members, meeting.places, strict=True)
        for index, (member, place) in enumerate(members):
            given = () if member.gives is None else (self.tensor(member.device, member.gives),)
            got = () if member.gets is None else (self.tensor(member.device, member.gets),)
            kind = "recv" if message and index == 1 else communication.kind
            task = pl.SuperTask(
                kind=kind,  # type: ignore[arg-type]
                inputs=given,
                outputs=got,
                device=member.device,
                group=group,
                device_idx=index,
                metadata=dict(communication.metadata),
            )
            self._add(f"{group}.{kind}.{member.device}", task, place)

    def _add(self, name: str, task: pl.SuperTask, place: PhaseStage) -> None:
        task.phase, task.stage = place.phase, place.stage
        self.tasks[name] = task
        self.makers.update(dict.fromkeys(task.outputs, name))

    def _add_identity(self, part: LocalSlice, name: str, place: PhaseStage) -> str:
        """A task that hands a slot's value on as a produced tensor called ``name``."""
        value = self.localized.slots[part.device].value(part.value)
        source = self.tensor(part.device, part.value, "i0")
        builder = Builder("identity")
        text = encode(builder.finish([builder.input("x", value.shape, value.dtype)]))
        result = self._declare(name, part.device, value, None)
        task = pl.SuperTask("FX", (source,), (result,), part.device, text)
        self._add(f"identity.{result}", task, place)
        return result

    # --- ends ---------------------------------------------------------------------------------

    def add_inputs(self, tasks: Sequence[Task]) -> None:
        """The pipeline's inputs: the slices of the originals' that anything reads."""
        read = self._read(tasks)
        for value_id, parts in self.localized.inputs.items():
            for part in parts:
                if (part.device, part.value) in read:
                    name = self.tensor(part.device, part.value)
                    value = self.localized.slots[part.device].value(part.value)
                    self.tensors[name].strides = _in_one_piece(value)
                    self.inputs[name] = self.originals.slice_of_input(value_id, part)

    def _read(self, tasks: Sequence[Task]) -> set[tuple[str, int]]:
        """The slots' values that tasks read, and those that lie at the ends."""
        ends = [part for parts in self.localized.outputs for part in parts]
        ends += [new for _, new in self.localized.updates]
        read = {(part.device, part.value) for part in ends}
        for task in tasks:
            if isinstance(task, ComputeSegment):
                read.update((task.device, value_id) for value_id in task.inputs)
            else:
                members = task.communication.members
                read.update((m.device, m.gives) for m in members if m.gives is not None)
        return read

    def add_outputs(self) -> None:
        """The pipeline's outputs, each slice a produced tensor of its own."""
        slices = zip(self.originals.outputs, self.localized.outputs, strict=True)
        for (origin, value_id), parts in slices:
            value = self.originals.graph.values[value_id]
            last = PhaseStage("update") if self._given_once(value_id) else None
            for part in parts:
                name = self.names.get((part.device, part.value), "")
                place = self._place(part)
                if last and value.shape and place.phase in MICROBATCH_PHASES:
                    raise PlanError(_many_outputs(origin, value, self.originals.graph))
                if name not in self.makers or name in self.outputs or (last and place != last):
                    name = self._add_identity(part, origin, last or place)
                self.outputs[name] = slice_of(value, origin, part)

    def _given_once(self, value_id: int) -> bool:
        """Whether an output of a training step is not put together from the microbatches'."""
        return self.originals.microbatches > 1 and value_id not in self.originals.dims

    def _place(self, part: LocalSlice) -> PhaseStage:
        """Where a slot's value is made; for one that comes from outside, where it is there."""
        name = self.names.get((part.device, part.value), "")
        if name in self.makers:
            maker = self.tasks[self.makers[name]]
            return PhaseStage(maker.phase, maker.stage)
        if not self.stages:
            return PhaseStage()
        if (part.device, part.value) in self.batched:
            return PhaseStage("forward", self.stages[part.device])
        return PhaseStage("update")

    def add_updates(self) -> None:
        """Which produced tensor replaces which stored one, on every slot that has it.

        A stored value that nothing reads has no tensor, and its update no effect.
        """
        for old, new in self.localized.updates:
            tensor = self.names.get((old.device, old.value))
            if tensor is not None:
                self.replaces[self._replacement(new, tensor)] = tensor

    def _replacement(self, new: LocalSlice, old: str) -> str:
        """The produced tensor of a slot's new value, not yet used as one."""
        name = self.names.get((new.device, new.value), "")
        if name not in self.makers or name in self.replaces:
            return self._add_identity(new, f"{old}.new", self._place(new))
        return name

    # --- the end ------------------------------------------------------------------------------

    def requires(self) -> tuple[str, ...]:
        """The operators that torch does not bring: runners must import what registers them."""
        return tuple(sorted(op for op in self.operators if not is_built_in(op)))

    def share_graphs(self) -> dict[str, str]:
        """Move texts that several tasks have to blobs."""
        texts = [task.data for task in self.tasks.values() if task.data is not None]
        repeated = [text for text, count in Counter(texts).items() if count > 1]
        names = {text: f"b{i}" for i, text in enumerate(repeated)}
        for task in self.tasks.values():
            if task.data in names:
                task.data_blob, task.data = names[task.data], None
        return {name: text for text, name in names.items()}


def _many_outputs(name: str, value: IRValue, graph: IRGraph) -> str:
    few = "; of a microbatch of one row it cannot be told" * (batch_rows(graph) == 1)
    return (
        f"the step returns {name!r}, {value.dtype}{list(value.shape)}, which each microbatch makes "
        f"anew; return numbers, which are summed up, or what has the batch's dimension{few}, or "
        "plan with microbatches=1"
    )


def _in_one_piece(value: IRValue) -> tuple[int, ...] | None:
    """The strides of what a runner is given: it lies without gaps."""
    return value.strides if is_dense(value.shape, value.strides) else None
