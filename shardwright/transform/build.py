"""From a graph and a plan to a Pipeline.

Each segment becomes an FX supertask; a value that another slot reads becomes a send and a recv
behind the task that makes it, so that the file's order is one in which every slot can run its
tasks with blocking communication. Inputs, parameters and buffers that several slots read are one
tensor a slot, with one origin: nothing is sent that can be read in place.

Names: a tensor has its value's name on the slot where it is made or first read, and ``name@slot``
elsewhere. A returned input, a returned stored value and an output that repeats another pass
through an identity task.
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
from shardwright.pipeline.fxtext import encode
from shardwright.planning.plan import Plan, check_belongs
from shardwright.planning.tables import split_tables
from shardwright.transform.segments import Segment, segments
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
    graph = split_tables(graph, plan.table_splits)
    parts = segments(graph, plan)
    assembly = _Assembly(graph, source, readers(parts))
    for segment in parts:
        assembly.add_segment(segment)
    assembly.add_outputs()
    assembly.add_updates()
    slots = {
        stage.device: pl.Device(kind=device_kind, idx=index)
        for index, stage in enumerate(plan.stages)
    }
    pipeline = assembly.finish(graph.name, slots)
    pipeline.weights = source.carried
    pl.check(pipeline)
    return pipeline


def readers(parts: Sequence[Segment]) -> dict[int, list[str]]:
    """The slots that read each value, in the order in which they first do."""
    found: dict[int, list[str]] = {}
    for segment in parts:
        for value_id in segment.part.inputs:
            slots = found.setdefault(value_id, [])
            if segment.device not in slots:
                slots.append(segment.device)
    return found


@dataclass
class _Assembly:
    """A file in the making; `finish` gives it."""

    graph: IRGraph
    weights: WeightSource
    readers: dict[int, list[str]]
    tensors: dict[str, pl.TensorInfo] = field(default_factory=dict)
    tasks: dict[str, pl.SuperTask] = field(default_factory=dict)
    place: dict[tuple[int, str], str] = field(default_factory=dict)
    """The tensor that holds a value on a slot."""
    home: dict[int, str] = field(default_factory=dict)
    """The slot where a value was first made or read."""
    inputs: dict[str, pl.MetadataTensorSlice] = field(default_factory=dict)
    outputs: dict[str, pl.MetadataTensorSlice] = field(default_factory=dict)
    replaces: dict[str, str] = field(default_factory=dict)
    groups: int = 0

    # --- compute ------------------------------------------------------------------------------

    def add_segment(self, segment: Segment) -> None:
        """A compute task, and behind it the sends to every slot that reads what it makes."""
        device = segment.device
        for value_id in segment.part.inputs:
            self.bring(value_id, device)
        placeholders = {v: f"i{i}" for i, v in enumerate(segment.part.inputs)}
        for value_id, placeholder in placeholders.items():
            self.name_in_graph(self.place[value_id, device], placeholder)
        for value_id in segment.part.outputs:
            self.declare(self.graph.values[value_id], device)
        self.tasks[segment.name] = pl.SuperTask(
            kind="FX",
            inputs=tuple(self.place[value_id, device] for value_id in segment.part.inputs),
            outputs=tuple(self.place[value_id, device] for value_id in segment.part.outputs),
            device=device,
            data=encode(segment.part.graph),
        )
        for value_id in segment.part.outputs:
            for reader in self.readers.get(value_id, ()):
                self.bring(value_id, reader)

    def name_in_graph(self, tensor: str, placeholder: str) -> None:
        """Note the placeholder of a constant in its first user's graph."""
        value = self.tensors[tensor].value
        if value is not None and not value.name_in_graph:
            value.name_in_graph = placeholder

    def bring(self, value_id: int, device: str) -> str:
        """The name of the tensor that holds a value on a slot, after making sure one does."""
        if (value_id, device) in self.place:
            return self.place[value_id, device]
        value = self.graph.values[value_id]
        if value.is_stored:
            return self.declare(value, device, self.weights.locate(value, ""))
        if value.role == "input":
            return self.add_input(value, device)
        return self.transfer(value, self.home[value_id], device)

    def declare(self, value: IRValue, device: str, stored: pl.ParamValue | None = None) -> str:
        """A tensor for a value on a slot."""
        if value.dtype not in FILE_DTYPES:
            raise PipelineError(
                f"dtype {value.dtype} is none of the format's ({', '.join(FILE_DTYPES)}); "
                "cast it in the model, or on the way in",
                tensor=value.name,
            )
        name = value.name if value.id not in self.home else f"{value.name}@{device}"
        return self._declare_as(name, value, device, stored)

    def _declare_as(
        self, name: str, value: IRValue, device: str, stored: pl.ParamValue | None = None
    ) -> str:
        while name in self.tensors:
            name += "'"
        self.tensors[name] = pl.TensorInfo(
            shape=value.shape,
            dtype=value.dtype,  # type: ignore[arg-type]
            value=stored,
            strides=value.strides if is_dense(value.shape, value.strides) else None,
        )
        self.home.setdefault(value.id, device)
        self.place[value.id, device] = name
        return name

    def add_input(self, value: IRValue, device: str) -> str:
        """A pipeline input: the whole of an original input, on a slot that reads it."""
        name = self.declare(value, device)
        self.inputs[name] = self._slice(value, value.name, device)
        return name

    def _slice(self, value: IRValue, origin: str, device: str) -> pl.MetadataTensorSlice:
        return pl.MetadataTensorSlice(
            placements=tuple((0, size) for size in value.shape),
            origin=origin,
            dtype=value.dtype,  # type: ignore[arg-type]
            device=device,
        )

    # --- communication ------------------------------------------------------------------------

    def transfer(self, value: IRValue, source: str, device: str) -> str:
        """A send on the slot that made a value and a recv on one that reads it."""
        sent = self.place[value.id, source]
        received = self.declare(value, device)
        group = f"g{self.groups}"
        self.groups += 1
        ends = ((0, "send", source, (sent,), ()), (1, "recv", device, (), (received,)))
        for index, kind, slot, inputs, outputs in ends:
            self.tasks[f"{kind}.{received}"] = pl.SuperTask(
                kind=kind,  # type: ignore[arg-type]
                inputs=inputs,
                outputs=outputs,
                device=slot,
                group=group,
                device_idx=index,
                metadata={},
            )
        return received

    # --- ends ---------------------------------------------------------------------------------

    def add_outputs(self) -> None:
        """The pipeline's outputs, each a produced tensor of its own."""
        seen: set[int] = set()
        for leaf, value_id in zip(self.graph.output_names, self.graph.outputs, strict=True):
            value = self.graph.values[value_id]
            if value.producer is None or value_id in seen:
                device = self.home.get(value_id) or self._any_device()
                name = self.add_identity(value, device, leaf)
            else:
                device = self.home[value_id]
                name = self.place[value_id, device]
            seen.add(value_id)
            self.outputs[name] = self._slice(value, leaf, device)

    def add_identity(self, value: IRValue, device: str, name: str) -> str:
        """A task that hands a value on as a produced tensor called ``name``."""
        source = self.bring(value.id, device)
        self.name_in_graph(source, "i0")
        builder = Builder("identity")
        same = builder.copy_value(self.graph, value, role="input")
        text = encode(builder.finish([same]))
        place = self.place[value.id, device]
        result = self._declare_as(name, value, device)
        self.place[value.id, device] = place
        self.tasks[f"identity.{result}"] = pl.SuperTask(
            kind="FX", inputs=(source,), outputs=(result,), device=device, data=text
        )
        return result

    def _any_device(self) -> str:
        """A slot that has a task already."""
        return next(task.device for task in self.tasks.values() if task.device is not None)

    def add_updates(self) -> None:
        """Which produced tensor replaces which stored one after a run, on every slot that has it.

        A stored value that nothing reads has no tensor, and its update no effect.
        """
        for old, new in self.graph.updates.items():
            for (value_id, device), tensor in list(self.place.items()):
                if value_id == old:
                    self.replaces[self.add_replacement(new, device, tensor)] = tensor

    def add_replacement(self, new: int, device: str, old: str) -> str:
        """The produced tensor on a slot that holds a new value, not yet used as one."""
        value = self.graph.values[new]
        if value.producer is None or self.place.get((new, device)) in self.replaces:
            return self.add_identity(value, device, f"{old}.new")
        return self.bring(new, device)

    # --- the end ------------------------------------------------------------------------------

    def finish(self, name: str, devices: dict[str, pl.Device]) -> pl.Pipeline:
        """The file, with equal graphs shared."""
        idle = devices.keys() - {task.device for task in self.tasks.values()}
        if idle:
            raise PlanError(f"the plan gives {', '.join(sorted(idle))} nothing to do; plan again")
        ends = {
            "input": pl.SuperTask(kind="input", inputs=(), outputs=tuple(self.inputs)),
            "output": pl.SuperTask(kind="output", inputs=tuple(self.outputs), outputs=()),
        }
        blobs = self._share_graphs()
        return pl.Pipeline(
            name=name,
            devices=devices,
            tensors=self.tensors,
            supertasks={"input": ends["input"], **self.tasks, "output": ends["output"]},
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
        return pl.Metadata(
            tensors=pl.MetadataTensors(
                inputs=self._originals(
                    [leaf.name for leaf in leaves(graph.in_structure)], graph.inputs
                ),
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
