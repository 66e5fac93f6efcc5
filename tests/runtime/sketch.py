"""Pipelines drawn by hand, a supertask at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.communication import even_sizes
from shardwright.ir import Builder
from shardwright.ir.tensor_meta import dtype_name
from shardwright.pipeline import (
    Device,
    Metadata,
    MetadataTensor,
    MetadataTensors,
    MetadataTensorSlice,
    MetadataTensorSlices,
    ParamValue,
    Pipeline,
    SuperTask,
    TensorInfo,
    Training,
)
from shardwright.pipeline.fxtext import encode

Shape = tuple[int, ...]


class Sketch:
    """Collects tensors and supertasks; `finish` gives the pipeline."""

    def __init__(self, slots: int, kind: str = "cpu") -> None:
        self.devices = {f"d{i}": Device(kind, i) for i in range(slots)}
        self.tensors: dict[str, TensorInfo] = {}
        self.tasks: dict[str, SuperTask] = {}
        self.contents: dict[str, Tensor] = {}
        self.placeholders: dict[str, str] = {}
        self.inputs: dict[str, str] = {}
        self.originals: dict[str, tuple[str, Any]] = {}
        self.requires: tuple[str, ...] | None = None

    def input(
        self, name: str, shape: Shape, device: str = "d0", dtype: str = "f32", part: Any = None
    ) -> str:
        """A pipeline input; ``part`` is (name of the original, placements)."""
        self.tensors[name] = TensorInfo(shape, dtype)
        self.inputs[name] = device
        self.originals[name] = part or (name, tuple((0, size) for size in shape))
        return name

    def constant(self, name: str, content: Tensor) -> str:
        self.contents[name] = content
        return name

    def fx(
        self,
        task: str,
        device: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        write: Callable[..., Any],
    ) -> None:
        """A compute supertask: ``write(builder, *values)`` gives its results."""
        builder = Builder(task)
        values = []
        for k, name in enumerate(inputs):
            if name in self.contents:
                self._place_constant(name, f"i{k}")
            info = self.tensors[name]
            values.append(builder.input(f"i{k}", info.shape, info.dtype, strides=info.strides))
        found = write(builder, *values)
        graph = builder.finish(found if isinstance(found, list) else [found])
        for name, value_id in zip(outputs, graph.outputs, strict=True):
            value = graph.values[value_id]
            self.tensors[name] = TensorInfo(value.shape, value.dtype, strides=value.strides)
        self.tasks[task] = SuperTask(
            "FX", tuple(inputs), tuple(outputs), device=device, data=encode(graph)
        )

    def send(self, tensor: str, source: str, target: str) -> str:
        """Send and recv of a tensor; gives its name on ``target``."""
        name = f"{tensor}@{target}"
        self.tensors[name] = self.tensors[tensor]
        fields = {"group": f"{tensor} to {target}", "metadata": {}}
        self.tasks[f"send.{name}"] = SuperTask(
            "send", (tensor,), (), device=source, device_idx=0, **fields
        )
        self.tasks[f"recv.{name}"] = SuperTask(
            "recv", (), (name,), device=target, device_idx=1, **fields
        )
        return name

    def together(
        self,
        kind: str,
        inputs: dict[str, str],
        outputs: dict[str, tuple[str, Shape]],
        group: str | None = None,
        **metadata: Any,
    ) -> None:
        """A collective: input by device, output name and shape by device."""
        devices = list(dict.fromkeys((*inputs, *outputs)))
        devices.sort()
        dtype = self.tensors[next(iter(inputs.values()))].dtype
        for index, device in enumerate(devices):
            if device in outputs:
                name, shape = outputs[device]
                self.tensors[name] = TensorInfo(shape, dtype)
            self.tasks[f"{group or kind}.{device}"] = SuperTask(
                kind,
                (inputs[device],) if device in inputs else (),
                (outputs[device][0],) if device in outputs else (),
                device=device,
                group=group or kind,
                device_idx=index,
                metadata=metadata,
            )

    def finish(
        self,
        outputs: Sequence[str],
        *,
        replaces: dict[str, str] | None = None,
        parts: dict[str, tuple[str, Any]] | None = None,
    ) -> Pipeline:
        """The pipeline; ``parts`` say of which original an output is a part."""
        parts = parts or {}
        whole = {name: parts.get(name, (name, self._everything(name))) for name in outputs}
        tasks = {
            "input": SuperTask("input", (), tuple(self.inputs)),
            **self.tasks,
            "output": SuperTask("output", tuple(outputs), ()),
        }
        homes = {name: task.device for task in self.tasks.values() for name in task.outputs}
        pipeline = Pipeline(
            name="sketch",
            devices=self.devices,
            tensors=self.tensors,
            supertasks=tasks,
            metadata=Metadata(
                MetadataTensors(self._wholes(self.originals), self._wholes(whole)),
                MetadataTensorSlices(
                    self._slices(self.originals, self.inputs), self._slices(whole, homes)
                ),
            ),
            training=Training(replaces=replaces) if replaces else None,
            requires=self.requires,
        )
        for name, content in self.contents.items():
            pipeline.weights.put("weights", name, content)
        return pipeline

    def _place_constant(self, name: str, placeholder: str) -> None:
        if name in self.tensors:
            return
        content = self.contents[name]
        shape = tuple(content.shape)
        value = ParamValue(
            path="weights",
            format="safetensors",
            name=name,
            name_in_graph=placeholder,
            placements=tuple((0, size) for size in shape),
        )
        self.tensors[name] = TensorInfo(shape, dtype_name(content.dtype), value=value)

    def _everything(self, name: str) -> Any:
        return tuple((0, size) for size in self.tensors[name].shape)

    def _wholes(self, parts: dict[str, tuple[str, Any]]) -> dict[str, MetadataTensor]:
        """The originals, as large as their parts reach."""
        shapes: dict[str, Shape] = {}
        dtypes: dict[str, str] = {}
        for name, (origin, placements) in parts.items():
            ends = tuple(end for _, end in placements)
            shapes[origin] = tuple(map(max, shapes.get(origin, ends), ends))
            dtypes[origin] = self.tensors[name].dtype
        return {
            origin: MetadataTensor(shape, dtypes[origin], idx)
            for idx, (origin, shape) in enumerate(shapes.items())
        }

    def _slices(
        self, parts: dict[str, tuple[str, Any]], homes: dict[str, Any]
    ) -> dict[str, MetadataTensorSlice]:
        return {
            name: MetadataTensorSlice(placements, origin, self.tensors[name].dtype, homes[name])
            for name, (origin, placements) in parts.items()
        }


# --- pipelines ---------------------------------------------------------------------------------


def chain(slots: int = 2, width: int = 4, op: str = "aten.relu.default") -> Pipeline:
    """``width`` features through a linear layer and ``op`` on each slot in turn."""
    sketch = Sketch(slots)
    if not op.startswith("aten."):
        sketch.requires = (op,)
    tensor = sketch.input("x", (3, width))
    for i in range(slots):
        if i:
            tensor = sketch.send(tensor, f"d{i - 1}", f"d{i}")
        weight = sketch.constant(f"w{i}", chain_weight(i, width))
        sketch.fx(f"d{i}.0", f"d{i}", [tensor, weight], [f"y{i}"], _layer(op))
        tensor = f"y{i}"
    return sketch.finish([tensor])


def chain_weight(slot: int, width: int = 4) -> Tensor:
    return torch.randn(width, width, generator=torch.Generator().manual_seed(slot))


def chain_result(x: Tensor, slots: int = 2, width: int = 4) -> Tensor:
    """What `chain` computes."""
    for i in range(slots):
        x = torch.relu(torch.nn.functional.linear(x, chain_weight(i, width)))
    return x


def _layer(op: str) -> Callable[..., Any]:
    def write(builder: Builder, x: Any, weight: Any) -> Any:
        return builder.call(op, builder.call("aten.linear.default", x, weight))

    return write


def identity(builder: Builder, value: Any) -> Any:
    return builder.call("aten.clone.default", value)


def every_collective(slots: int, dtype: str = "f32") -> Pipeline:
    """Every kind of communication once among all slots, uneven where that can be."""
    sketch = Sketch(slots)
    names = [f"d{i}" for i in range(slots)]
    sizes = even_sizes(2 * slots + 1, slots)
    total = sum(sizes)
    starts = [sum(sizes[:i]) for i in range(slots)]
    for i, device in enumerate(names):
        part = ("x", ((starts[i], starts[i] + sizes[i]), (0, total)))
        sketch.input(f"x{i}", (sizes[i], total), device, dtype, part)
    own = {device: f"x{i}" for i, device in enumerate(names)}

    def made(stem: str, shape: Callable[[int], Shape]) -> dict[str, tuple[str, Shape]]:
        return {device: (f"{stem}{i}", shape(i)) for i, device in enumerate(names)}

    def after(outputs: dict[str, tuple[str, Shape]]) -> dict[str, str]:
        return {device: name for device, (name, _) in outputs.items()}

    gathered = made("gathered", lambda i: (total, total))
    sketch.together("all_gather", own, gathered, dim=0)
    summed = made("summed", lambda i: (total, total))
    sketch.together("all_reduce", after(gathered), summed, reduce_op="sum")
    scattered = made("scattered", lambda i: (total, sizes[i]))
    sketch.together("reduce_scatter", after(summed), scattered, reduce_op="max", dim=1)
    exchanged = made("exchanged", lambda i: (sizes[i], total))
    sketch.together("all_to_all", after(scattered), exchanged, src_dim=0, dst_dim=1)
    again = made("again", lambda i: (total, total))
    sketch.together("all_gather", after(exchanged), again, group="again", dim=0)
    last = names[-1]
    sketch.together(
        "reduce", after(again), {last: ("reduced", (total, total))}, reduce_op="sum", dst=last
    )
    spread = made("spread", lambda i: (total, total))
    sketch.together("broadcast", {last: "reduced"}, spread, src=last)
    sent = sketch.send("spread0", "d0", last)
    sketch.fx("sent", last, [sent], ["y"], identity)
    sketch.fx("end", "d0", ["again0"], ["z"], identity)
    return sketch.finish(["y", "z"])


def every_collective_result(x: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    """What `every_collective` computes."""
    once = x * slots
    return once * slots, once
