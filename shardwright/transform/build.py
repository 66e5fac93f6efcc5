"""From a graph and a plan to a Pipeline.

The planned graph is written out as one graph a slot (`localize`), cut in tasks (`segments`), and
put into the file's form here: tensors with their names and origins, supertasks in an order that
every slot can run with blocking communication, and the metadata that the Generator needs.

Names: a tensor has its value's name on the slot that first has it, and ``name@slot`` elsewhere. A
returned input, a returned stored value and an output that repeats another pass through an identity
task.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import shardwright.pipeline as pl
from shardwright.errors import PipelineError, PlanError
from shardwright.ir import Builder, IRGraph, IRValue
from shardwright.ir.dtypes import FILE_DTYPES
from shardwright.ir.operators import BUILT_IN_NAMESPACES
from shardwright.ir.structure import leaves
from shardwright.ir.values import contiguous_strides
from shardwright.pipeline.fxtext import encode, encode_part
from shardwright.planning.plan import Plan, check_belongs
from shardwright.planning.unfuse import unfuse
from shardwright.transform.localize import localize
from shardwright.transform.segments import Segment, tasks
from shardwright.transform.slots import Communication, Localized, Part
from shardwright.transform.weights import Rename, WeightSource

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

    ``weights`` is a safetensors file, or the index of a sharded one, that the pipeline shall read
    its parameters from; without it they are carried along and written beside the file.
    ``rename`` takes the model's parameter names to the file's. ``device_kind`` is the kind of
    every slot, ``cpu`` or ``cuda``.
    Raises PlanError where the plan is for another graph, WeightError, PipelineError.
    """
    check_belongs(plan, graph)
    source = WeightSource(graph, weights, rename)
    planned = unfuse(graph, plan.unfused)
    localized = localize(planned, plan)
    assembly = _Assembly(planned, localized, source)
    assembly.add_inputs()
    for task in tasks(localized):
        if isinstance(task, Segment):
            assembly.add_segment(task)
        else:
            assembly.add_communication(task)
    assembly.add_outputs()
    assembly.add_updates()
    slots = {
        device: pl.Device(kind=device_kind, idx=index) for index, device in enumerate(plan.devices)
    }
    pipeline = assembly.finish(graph.name, slots)
    pipeline.weights = source.carried
    pl.check(pipeline)
    return pipeline


@dataclass
class _Assembly:
    """A file in the making; `finish` gives it."""

    graph: IRGraph
    localized: Localized
    weights: WeightSource
    tensors: dict[str, pl.TensorInfo] = field(default_factory=dict)
    tasks: dict[str, pl.SuperTask] = field(default_factory=dict)
    names: dict[tuple[str, int], str] = field(default_factory=dict)
    """The tensor of each value of a slot."""
    inputs: dict[str, pl.MetadataTensorSlice] = field(default_factory=dict)
    outputs: dict[str, pl.MetadataTensorSlice] = field(default_factory=dict)
    replaces: dict[str, str] = field(default_factory=dict)
    groups: int = 0

    # --- tensors ------------------------------------------------------------------------------

    def tensor(self, device: str, value_id: int, placeholder: str = "") -> str:
        """The tensor of a slot's value, declared at its first use.

        ``placeholder`` is its name in the graph that uses it here.
        """
        key = (device, value_id)
        if key not in self.names:
            value = self.localized.slots[device].value(value_id)
            stored = self.weights.locate(value, placeholder) if value.is_stored else None
            self.names[key] = self.declare(value.name, device, value, stored)
        return self.names[key]

    def declare(
        self, wanted: str, device: str, value: IRValue, stored: pl.ParamValue | None = None
    ) -> str:
        """A tensor of a value's kind: ``wanted``, or ``wanted@slot`` where that is taken."""
        if value.dtype not in FILE_DTYPES:
            raise PipelineError(
                f"dtype {value.dtype} is none of the format's ({', '.join(FILE_DTYPES)}); "
                "cast it in the model, or on the way in",
                tensor=value.name,
            )
        name = wanted if wanted not in self.tensors else f"{wanted}@{device}"
        while name in self.tensors:
            name += "'"
        self.tensors[name] = pl.TensorInfo(
            shape=value.shape,
            dtype=value.dtype,  # type: ignore[arg-type]
            value=stored,
            strides=value.strides if is_dense(value.shape, value.strides) else None,
        )
        return name

    def add_inputs(self) -> None:
        """The pipeline's inputs: the slices that slots take of the original's."""
        for value_id, parts in self.localized.inputs.items():
            for part in parts:
                origin = self.graph.values[value_id]
                name = self.tensor(part.device, part.value)
                self.inputs[name] = self.slice_of(origin, origin.name, part)

    def slice_of(self, value: IRValue, origin: str, part: Part) -> pl.MetadataTensorSlice:
        """What a tensor is of an original input or output."""
        return pl.MetadataTensorSlice(
            placements=part.ranges,
            origin=origin,
            dtype=value.dtype,  # type: ignore[arg-type]
            device=part.device,
        )

    # --- tasks --------------------------------------------------------------------------------

    def add_segment(self, segment: Segment) -> None:
        """A compute task."""
        device = segment.device
        graph = self.localized.slots[device].builder.graph
        self.tasks[segment.name] = pl.SuperTask(
            kind="FX",
            inputs=tuple(self.tensor(device, v, f"i{i}") for i, v in enumerate(segment.inputs)),
            outputs=tuple(self.tensor(device, v) for v in segment.outputs),
            device=device,
            data=encode_part(graph, segment.nodes, segment.inputs, segment.outputs),
        )

    def add_communication(self, communication: Communication) -> None:
        """A task for each member, all in one group."""
        group = f"g{self.groups}"
        self.groups += 1
        message = communication.kind == "send"
        for index, member in enumerate(communication.members):
            given = () if member.gives is None else (self.tensor(member.device, member.gives),)
            got = () if member.gets is None else (self.tensor(member.device, member.gets),)
            kind = "recv" if message and index == 1 else communication.kind
            self.tasks[f"{group}.{kind}.{member.device}"] = pl.SuperTask(
                kind=kind,  # type: ignore[arg-type]
                inputs=given,
                outputs=got,
                device=member.device,
                group=group,
                device_idx=index,
                metadata=dict(communication.metadata),
            )

    def add_identity(self, part: Part, name: str) -> str:
        """A task that hands a slot's value on as a produced tensor called ``name``."""
        value = self.localized.slots[part.device].value(part.value)
        source = self.tensor(part.device, part.value, "i0")
        builder = Builder("identity")
        text = encode(builder.finish([builder.input("x", value.shape, value.dtype)]))
        result = self.declare(name, part.device, value)
        self.tasks[f"identity.{result}"] = pl.SuperTask(
            kind="FX", inputs=(source,), outputs=(result,), device=part.device, data=text
        )
        return result

    # --- ends ---------------------------------------------------------------------------------

    def add_outputs(self) -> None:
        """The pipeline's outputs, each slice a produced tensor of its own."""
        origins = zip(self.graph.output_names, self.graph.outputs, strict=True)
        for (origin, value_id), parts in zip(origins, self.localized.outputs, strict=True):
            value = self.graph.values[value_id]
            for part in parts:
                name = self.names.get((part.device, part.value))
                if value.producer is None or name is None or name in self.outputs:
                    name = self.add_identity(part, origin)
                self.outputs[name] = self.slice_of(value, origin, part)

    def add_updates(self) -> None:
        """Which produced tensor replaces which stored one after a run, on every slot that has it.

        A stored value that nothing reads has no tensor, and its update no effect.
        """
        for old, new in self.localized.updates:
            tensor = self.names.get((old.device, old.value))
            if tensor is not None:
                self.replaces[self.replacement(new, tensor)] = tensor

    def replacement(self, new: Part, old: str) -> str:
        """The produced tensor of a slot's new value, not yet used as one."""
        value = self.localized.slots[new.device].value(new.value)
        name = self.names.get((new.device, new.value))
        if value.producer is None or name is None or name in self.replaces:
            return self.add_identity(new, f"{old}.new")
        return name

    # --- the end ------------------------------------------------------------------------------

    def finish(self, name: str, devices: dict[str, pl.Device]) -> pl.Pipeline:
        """The file, with equal graphs shared."""
        idle = devices.keys() - {task.device for task in self.tasks.values()}
        if idle:
            raise PlanError(f"the plan gives {', '.join(sorted(idle))} nothing to do; plan again")
        blobs = self._share_graphs()
        return pl.Pipeline(
            name=name,
            devices=devices,
            tensors=self.tensors,
            supertasks={
                "input": pl.SuperTask(kind="input", inputs=(), outputs=tuple(self.inputs)),
                **self.tasks,
                "output": pl.SuperTask(kind="output", inputs=tuple(self.outputs), outputs=()),
            },
            metadata=self._metadata(),
            version=FORMAT_VERSION,
            blobs=blobs or None,
            training=pl.Training(replaces=self.replaces) if self.replaces else None,
            requires=self._requires() or None,
        )

    def _requires(self) -> tuple[str, ...]:
        """The operators that torch does not bring: runners must import what registers them."""
        operators = {node.op for node in self.graph.nodes}
        return tuple(sorted(op for op in operators if op.split(".")[0] not in BUILT_IN_NAMESPACES))

    def _share_graphs(self) -> dict[str, str]:
        """Move texts that several tasks have to blobs."""
        texts = [task.data for task in self.tasks.values() if task.data is not None]
        repeated = [text for text, count in Counter(texts).items() if count > 1]
        names = {text: f"b{i}" for i, text in enumerate(repeated)}
        for task in self.tasks.values():
            if task.data in names:
                task.data_blob, task.data = names[task.data], None
        return {name: text for text, name in names.items()}

    def _metadata(self) -> pl.Metadata:
        graph = self.graph
        assert graph.in_structure is not None
        assert graph.out_structure is not None
        input_names = [leaf.name for leaf in leaves(graph.in_structure)]
        return pl.Metadata(
            tensors=pl.MetadataTensors(
                inputs=self._originals(input_names, graph.inputs),
                outputs=self._originals(graph.output_names, graph.outputs),
            ),
            tensor_slices=pl.MetadataTensorSlices(inputs=self.inputs, outputs=self.outputs),
            structure=pl.Structure(inputs=graph.in_structure, outputs=graph.out_structure),
        )

    def _originals(
        self, names: Sequence[str], value_ids: Sequence[int]
    ) -> dict[str, pl.MetadataTensor]:
        values = [self.graph.values[value_id] for value_id in value_ids]
        return {
            name: pl.MetadataTensor(shape=value.shape, dtype=value.dtype, idx=i)  # type: ignore[arg-type]
            for i, (name, value) in enumerate(zip(names, values, strict=True))
        }


def is_dense(shape: Sequence[int], strides: Sequence[int] | None) -> bool:
    """Whether strides only permute the dimensions of a contiguous tensor."""
    if strides is None:
        return True
    order = sorted(range(len(shape)), key=lambda i: (-strides[i], -shape[i]))
    expected = contiguous_strides([shape[i] for i in order])
    return all(shape[i] == 1 or strides[i] == want for i, want in zip(order, expected, strict=True))
