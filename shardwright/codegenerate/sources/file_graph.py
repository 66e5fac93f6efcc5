"""The forward of a pipeline file as one graph.

Comes in: a pipeline whose slots exchange nothing but messages. Goes out: the nodes of all its
forward tasks as one graph, with the place of each: the virtual stage of a training step, else the
slot. What always holds: a message is the value that was sent, a constant on several slots is one
stored value, and what a task hands on is what it was given; the graph computes what the tasks do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from shardwright.errors import CodegenError
from shardwright.ir import Builder, IRGraph, IRNode, IRValue
from shardwright.ir.dtypes import torch_dtype
from shardwright.ir.values import with_absent
from shardwright.layout.ranges import whole
from shardwright.pipeline import MetadataTensor, ParamValue, Pipeline, SuperTask, TensorInfo
from shardwright.pipeline.graphs import TaskGraphs

FORWARD = (None, "prepare", "forward")
"""The phases of a file that are its forward."""
ONCE = "prepare"
"""The phase of what is done once a step, for all its microbatches."""


class FileGraph(NamedTuple):
    """A file's forward.

    places
        Of each node: its slot, its virtual stage, or None where it is done once a step.
    values
        The value ids of the file's tensors.
    inputs
        The value ids of the original inputs by name, in order.
    """

    graph: IRGraph
    places: list[Hashable | None]
    values: dict[str, int]
    inputs: dict[str, int]

    def placed(self, graph: IRGraph) -> Iterator[tuple[IRNode, Hashable | None]]:
        """The nodes of a graph that has the same number of them, with their places."""
        return zip(graph.nodes, self.places, strict=True)

    @property
    def once(self) -> frozenset[int]:
        """The nodes that are done once a step, by id."""
        return frozenset(node.id for node, place in self.placed(self.graph) if place is None)


def file_graph(pipeline: Pipeline) -> FileGraph:
    """The forward tasks of a plain pipeline, joined. Raises CodegenError for any other."""
    return _Joining(pipeline).run()


@dataclass(slots=True)
class _Joining:
    """One pipeline, task by task."""

    pipeline: Pipeline
    builder: Builder = field(init=False)
    graphs: TaskGraphs = field(init=False)
    buffers: frozenset[str] = field(init=False)
    """The constants that a forward task replaces."""
    values: dict[str, IRValue] = field(default_factory=dict)
    """By tensor."""
    stored: dict[Hashable, IRValue] = field(default_factory=dict)
    sent: dict[str, IRValue] = field(default_factory=dict)
    """By group, from the message's sending on."""
    places: list[Hashable | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.builder = Builder(self.pipeline.name)
        self.graphs = TaskGraphs(self.pipeline)
        self.buffers = frozenset(_replaced(self.pipeline))

    def run(self) -> FileGraph:
        """The graph; its ends are those that `values` tells."""
        inputs = self._inputs()
        queues = [
            deque(name for name in names if self._task(name).phase in FORWARD)
            for names in self.pipeline.connections.order.values()
        ]
        while any(queues):
            if not any(self._go(queue) for queue in queues):
                waiting = next(queue[0] for queue in queues if queue)
                raise CodegenError(f"task {waiting!r} waits for a message that nobody sends")
        values = {name: value.id for name, value in self.values.items()}
        return FileGraph(self.builder.graph, self.places, values, inputs)

    def _task(self, name: str) -> SuperTask:
        return self.pipeline.supertasks[name]

    # --- ends ---------------------------------------------------------------------------------

    def _inputs(self) -> dict[str, int]:
        """The original inputs, and the tensors that are each of them."""
        metadata = self.pipeline.metadata
        slices = metadata.tensor_slices.inputs
        strides = {
            piece.origin: self.pipeline.tensors[name].strides for name, piece in slices.items()
        }
        found = {}
        for name, origin in sorted(metadata.tensors.inputs.items(), key=lambda item: item[1].idx):
            shape = microbatch_shape(self.pipeline, name, origin)
            laid = strides.get(name)
            value = self.builder.input(name, shape, origin.dtype, strides=laid)
            found[name] = value.id
        for tensor, piece in slices.items():
            if any(self._task(user).phase in FORWARD for user in self._users(tensor)):
                self.values[tensor] = self._slice(tensor, found[piece.origin])
        return found

    def _users(self, tensor: str) -> list[str]:
        return self.pipeline.connections.users.get(tensor, [])

    def _slice(self, tensor: str, origin: int) -> IRValue:
        """The original input that a tensor is all of; of a whole batch a value of its own."""
        value, info = self.builder.graph.values[origin], self.pipeline.tensors[tensor]
        if info.shape == value.shape:
            return value
        if all(self._task(user).phase == ONCE for user in self._users(tensor)):
            return self.builder.value(f"{value.name}.whole", info.shape, info.dtype)
        raise refusal(self.pipeline, f"cuts the input {value.name!r} over several slots")

    def _constant(self, info: TensorInfo) -> IRValue:
        """A stored value, one for all slots that have the same."""
        if info.value is None:
            return self.builder.graph.new_value(
                "zeros", info.shape, info.dtype, role="state", init="zeros"
            )
        value = info.value
        key = (value.path, value.name, value.placements)
        if key not in self.stored:
            self.stored[key] = self._new_constant(value, info)
        return self.stored[key]

    def _new_constant(self, value: ParamValue, info: TensorInfo) -> IRValue:
        made = self.builder.graph.new_value(
            value.name,
            info.shape,
            info.dtype,
            role="buffer" if self._is_buffer(value, info) else "param",
            strides=info.strides,
            names=(value.name,),
            placements=None if value.placements == whole(value.shape or ()) else value.placements,
        )
        held = self.pipeline.weights.held(value)
        if held is not None:
            for dim, (start, end) in enumerate(value.placements):
                held = held.narrow(dim, start, end - start)
            self.builder.graph.tensors[made.id] = held
        return made

    def _is_buffer(self, value: ParamValue, info: TensorInfo) -> bool:
        """Whether a constant is no parameter: the forward changes it, or it is not of floats."""
        return value.name in self.buffers or not torch_dtype(info.dtype).is_floating_point

    # --- tasks --------------------------------------------------------------------------------

    def _go(self, queue: deque[str]) -> bool:
        """Do what a slot can do until it waits for a message; whether that is anything."""
        before = len(queue)
        while queue:
            name = queue[0]
            task = self._task(name)
            if task.kind == "recv" and task.group not in self.sent:
                break
            self._do(name, task)
            queue.popleft()
        return len(queue) < before

    def _do(self, name: str, task: SuperTask) -> None:
        group = task.group or ""
        if task.kind == "FX":
            self._compute(name, task)
        elif task.kind == "send":
            self.sent[group] = self._value(task.inputs[0])
        elif task.kind == "recv":
            self.values[task.outputs[0]] = self.sent[group]
        elif task.kind == "dfg":
            raise CodegenError(
                f"task {name!r} of {self.pipeline.name!r} is lowered: its data is calls of kernels "
                "and not of operators; generate code from the pipeline before lowering"
            )
        else:
            raise refusal(self.pipeline, f"splits nodes over slots (task {name!r} is {task.kind})")

    def _value(self, tensor: str) -> IRValue:
        """A tensor that is there, or a constant at its first use."""
        if tensor not in self.values:
            self.values[tensor] = self._constant(self.pipeline.tensors[tensor])
        return self.values[tensor]

    def _compute(self, name: str, task: SuperTask) -> None:
        """The nodes of a task, on its tensors."""
        graph = self.graphs.of(name)
        given = [self._value(tensor) for tensor in task.inputs]
        here = dict(zip(graph.inputs, given, strict=True))
        place: Hashable = task.device if task.stage is None else task.stage
        for node in graph.nodes:
            self._emit(graph, node, here)
            self.places.append(None if task.phase == ONCE else place)
        for tensor, value_id in zip(task.outputs, graph.outputs, strict=True):
            self.values[tensor] = here[value_id]

    def _emit(self, graph: IRGraph, node: IRNode, here: dict[int, IRValue]) -> None:
        """A node, with its results under its operator's name."""
        name = node.op.split(".")[1]
        made = []
        for value_id in node.outputs:
            value = graph.values[value_id]
            here[value_id] = self.builder.value(
                name, value.shape, value.dtype, strides=value.strides
            )
            made.append(here[value_id])
        inputs = [here[value_id] for value_id in node.inputs]
        self.builder.emit(node.op, inputs, node.attrs, outputs=with_absent(made, node.absent))


def _replaced(pipeline: Pipeline) -> Iterator[str]:
    """The names of stored contents that forward tasks replace."""
    for new, old in replacements(pipeline).items():
        value = pipeline.tensors[old].value
        makers = pipeline.connections.producers[new]
        if value is not None and pipeline.supertasks[makers[0]].phase in FORWARD:
            yield value.name


def replacements(pipeline: Pipeline) -> dict[str, str]:
    """Which tensor replaces which, in a forward or in a step."""
    return pipeline.training.replaces if pipeline.training is not None else {}


def microbatch_shape(pipeline: Pipeline, name: str, origin: MetadataTensor) -> tuple[int, ...]:
    """The shape of an original input or output in one microbatch."""
    training = pipeline.training
    cut = training.microbatches if training is not None else None
    shape = [*origin.shape]
    if cut is not None and name in cut.dim:
        shape[cut.dim[name]] //= cut.n
    return tuple(shape)


def refusal(pipeline: Pipeline, what: str) -> CodegenError:
    """The error for a file that is no plain pipeline."""
    return CodegenError(
        f"the file {pipeline.name!r} {what}, so that its tasks do not tell how the model was "
        "written; generate code from the plan and the graph (codegen(plan, path, graph=graph))"
    )
