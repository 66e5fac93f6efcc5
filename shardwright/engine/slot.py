"""One device slot loaded: its supertasks as programs, with the contents of its constants.

Supertasks that share a graph, the shapes they bind and what they overwrite share one program;
lowered ones share a plan, and all of a slot's one arena, as they run one at a time; on a GPU they
are recorded, and all of a slot's recordings share one pool.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardwright.comm.transport import Membership, TensorSpec, memberships
from shardwright.comm.wire import conform
from shardwright.compiler.cuda_graphs import GraphMemory, Record
from shardwright.compiler.memory.plan import ExecPlan
from shardwright.compiler.slots import SharedArena
from shardwright.compiler.tasks import FromZeros, TaskProgram, plan_task
from shardwright.devices import DEVICE_KINDS
from shardwright.engine.program import Relay, SlotProgram, slot_program
from shardwright.engine.replacement import MemoryUse
from shardwright.engine.walk import Does
from shardwright.errors import DeviceError, InputError
from shardwright.ir import IRGraph
from shardwright.ir.execute import compile_graph
from shardwright.ir.tensor_meta import describe_dtype, tensor_text, torch_dtype
from shardwright.kernels.files import decode
from shardwright.pipeline.graphs import TaskGraphs
from shardwright.pipeline.schema import Device, Document, StateOrigin, TensorInfo

Run = Callable[[Sequence[Tensor]], list[Tensor]]
"""From a supertask's inputs to its outputs."""


@dataclass(frozen=True, slots=True)
class CompiledTask:
    """A supertask's program; ``first`` is that of the first microbatch, where it has another."""

    program: Run
    first: Run | None = None


def compile_tasks(
    document: Document,
    memory: Mapping[str, MemoryUse],
    device: torch.device,
    graphs: TaskGraphs | None = None,
    *,
    fixed: bool = False,
) -> dict[str, CompiledTask]:
    """Compile supertasks, each with what it does to memory. Raises GraphError, ExecError.

    ``fixed`` promises that constants which no program overwrites never change: lowered programs
    may pack them.
    """
    compiler = _Compiler(document, device, graphs or TaskGraphs(document), fixed=fixed)
    compiler.reserve(memory)
    return {task: compiler.compile(task, found) for task, found in memory.items()}


def task_plan(document: Document, task: str) -> ExecPlan:
    """Where a lowered supertask's values lie when a slot runs it. Raises InputError, ExecError."""
    spec = document.supertasks.get(task)
    if spec is None or spec.kind != "dfg":
        known = [name for name, found in document.supertasks.items() if found.kind == "dfg"]
        raise InputError(
            f"{task!r} is no lowered supertask, which alone has a plan of its memory; lowered are: "
            f"{', '.join(known) or 'none, lower the pipeline first'}"
        )
    slot = str(spec.device)
    graphs = TaskGraphs(document)
    memory = slot_program(document, slot, graphs=graphs).memory[task]
    device = torch.device("cpu")
    return _Compiler(document, device, graphs, fixed=False).plan(task, memory)


class _Compiler:
    """Compiles supertasks, equal ones once."""

    def __init__(
        self, document: Document, device: torch.device, graphs: TaskGraphs, *, fixed: bool
    ) -> None:
        self._document = document
        self._device = device
        self._graphs = graphs
        self._fixed = fixed
        self._programs: dict[object, Run] = {}
        self._plans: dict[object, ExecPlan] = {}
        self._arena = SharedArena(device)
        self._record: Record | None = None

    def reserve(self, memory: Mapping[str, MemoryUse]) -> None:
        """Plan what is lowered, for the arena to be as large as any of it needs from the first."""
        lowered = [task for task in memory if self._document.supertasks[task].kind == "dfg"]
        plans = (self.plan(task, memory[task]) for task in lowered)
        self._arena.reserve(max((plan.arena_bytes for plan in plans), default=0))

    def compile(self, task: str, memory: MemoryUse) -> CompiledTask:
        if self._document.supertasks[task].kind == "dfg":
            return self._lowered(task, memory)
        program = self._program(task, memory, frozenset())
        first = self._program(task, memory, memory.zeros) if memory.zeros else None
        return CompiledTask(program, first)

    def _program(self, task: str, memory: MemoryUse, zeros: frozenset[str]) -> Run:
        """The program that overwrites what it may; some outputs get memory of their own."""
        spec, over = self._document.supertasks[task], memory.over
        key = (
            self._graphs.key(task),
            tuple((spec.outputs.index(new), spec.inputs.index(old)) for new, old in over.items()),
            tuple(sorted(map(spec.outputs.index, memory.fresh))),
            tuple(sorted(map(spec.inputs.index, zeros))),
        )
        if key not in self._programs:
            graph = self._graphs.of(task)
            donated = {
                graph.inputs[spec.inputs.index(old)]: graph.outputs[spec.outputs.index(new)]
                for new, old in over.items()
            }
            run: Run = compile_graph(
                graph,
                self._device,
                donated=donated,
                zeros=[graph.inputs[spec.inputs.index(old)] for old in zeros],
            )
            run = _cloning(run, key[2]) if memory.fresh else run
            self._programs[key] = _held(run, graph, frozenset(map(spec.outputs.index, over)))
        return self._programs[key]

    # --- lowered supertasks -------------------------------------------------------------------

    def _lowered(self, task: str, memory: MemoryUse) -> CompiledTask:
        """A supertask's program on the slot's arena."""
        promised = self._promised(task, memory)
        self._record = self._record or recorder(self._device)
        program = TaskProgram(
            self.plan(task, memory),
            self._device,
            self._arena,
            constants=promised.constants,
            donated=promised.donated,
            record=self._record,
        )
        inputs = self._document.supertasks[task].inputs
        zeros = [inputs.index(name) for name in memory.zeros]
        return CompiledTask(program, FromZeros(program, zeros) if zeros else None)

    def plan(self, task: str, memory: MemoryUse) -> ExecPlan:
        """A lowered supertask's plan; equal supertasks share it."""
        promised = self._promised(task, memory)
        key = self._graphs.key(task), tuple(promised.donated.items()), promised.fixed
        if key not in self._plans:
            data = self._document.data_of(task)
            lowered = decode(data, name=task)
            self._plans[key] = plan_task(lowered, promised.donated, promised.fixed)
        return self._plans[key]

    def _promised(self, task: str, memory: MemoryUse) -> _Promised:
        spec, tensors = self._document.supertasks[task], self._document.tensors
        constants = tuple(k for k, name in enumerate(spec.inputs) if tensors[name].is_constant)
        changed = {spec.inputs.index(name) for name in memory.over.values()}
        fixed = tuple(k for k in constants if self._fixed and k not in changed)
        donated = {
            spec.inputs.index(old): spec.outputs.index(new) for new, old in memory.over.items()
        }
        return _Promised(constants, fixed, donated)


@dataclass(frozen=True, slots=True)
class _Promised:
    """What holds of a lowered supertask's inputs, by position.

    ``constants`` are the same tensors at each run, ``fixed`` the same contents; what is ``donated``
    becomes the output at this position.
    """

    constants: tuple[int, ...]
    fixed: tuple[int, ...]
    donated: Mapping[int, int]


def recorder(device: torch.device) -> Record | None:
    """What records the runs of a slot's lowered supertasks; None where they are not recorded."""
    return GraphMemory(device).record if device.type == "cuda" else None


def _held(run: Run, graph: IRGraph, donated: Collection[int]) -> Run:
    """The program, whose results are held to what the file says of them, as it lays them out.

    Those at the positions ``donated`` lie in memory that is there already.
    """
    values = [graph.values[value_id] for value_id in graph.outputs]
    specs = [TensorSpec(v.shape, torch_dtype(v.dtype), v.strides) for v in values]

    def held(tensors: Sequence[Tensor]) -> list[Tensor]:
        results = run(tensors)
        for place, (made, spec) in enumerate(zip(results, specs, strict=True)):
            if made.shape != spec.shape or made.dtype != spec.dtype:
                raise ValueError(_unlike(graph, place, made))
            if made.stride() != spec.steps and made.is_cpu and place not in donated:
                results[place] = conform(made, spec)
        return results

    return held


def _unlike(graph: IRGraph, place: int, made: Tensor) -> str:
    """What a program made that the file says otherwise."""
    value = graph.values[graph.outputs[place]]
    node = next((k for k, node in enumerate(graph.nodes) if value.id in node.outputs), None)
    maker = "an input" if node is None else f"node 'n{node}' ({graph.nodes[node].op})"
    return (
        f"{maker} made {tensor_text(describe_dtype(made.dtype), made.shape)}, the file says "
        f"{tensor_text(value.dtype, value.shape)}"
    )


def _cloning(run: Run, positions: Sequence[int]) -> Run:
    """The program, with memory of their own for the results at ``positions``."""

    def cloning(tensors: Sequence[Tensor]) -> list[Tensor]:
        results = run(tensors)
        for position in positions:
            results[position] = results[position].clone()
        return results

    return cloning


# --- what stands in no file -----------------------------------------------------------------------


def storage_of(tensor: Tensor) -> int:
    """Which memory a tensor lies in."""
    return tensor.untyped_storage().data_ptr()


def _copy_pairs(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy each even one to the next; one that lies in memory to be written to is cloned first."""
    news, olds = tensors[::2], tensors[1::2]
    written = {storage_of(old) for old in olds}
    moved = [(new, old) for new, old in zip(news, olds, strict=True) if not _are_one(new, old)]
    sources = [new.clone() if storage_of(new) in written else new for new, _ in moved]
    for source, (_, old) in zip(sources, moved, strict=True):
        old.copy_(source)
    return []


def _are_one(new: Tensor, old: Tensor) -> bool:
    return new.data_ptr() == old.data_ptr() and new.stride() == old.stride()


def _set_to_zero(tensors: Sequence[Tensor]) -> list[Tensor]:
    for tensor in tensors:
        tensor.zero_()
    return []


def _stack(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.stack(list(tensors))]


MOVES: Mapping[Does, Run] = {
    "copy": _copy_pairs,
    "zero": _set_to_zero,
    "stack": _stack,
}
"""Programs of tasks that stand in no file."""


# --- a loaded slot --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoadedSlot:
    """What a `SlotEngine` runs.

    rank
        The position of the device in the file.
    tasks
        The programs of the supertasks that compute.
    moves
        Programs of what stands in no file.
    memberships
        Parts in operations, by supertask or relay.
    constants
        Contents by tensor name, on ``device``. Training steps change them in place.
    wholes
        Constants that are part of a named whole, and which part.
    """

    name: str
    rank: int
    device: torch.device
    program: SlotProgram
    tasks: Mapping[str, CompiledTask]
    moves: Mapping[Does, Run]
    memberships: Mapping[str, Membership]
    constants: dict[str, Tensor]
    wholes: Mapping[str, StateOrigin] = field(default_factory=dict)


def compile_slot(
    document: Document,
    name: str,
    constants: Mapping[str, Tensor],
    *,
    lookahead: int = 1,
    relays: Mapping[Relay, Membership] | None = None,
    fixed: bool = False,
) -> LoadedSlot:
    """Compile a slot. Raises GraphError, ExecError, DeviceError.

    ``relays`` are parts in operations that bring outputs of a step to other slots. ``fixed``
    promises that nobody changes constants but the slot's own programs.
    """
    graphs, relays = TaskGraphs(document), relays or {}
    program = slot_program(document, name, lookahead=lookahead, relays=(*relays,), graphs=graphs)
    device = torch_device(name, document.devices[name])
    return LoadedSlot(
        name=name,
        rank=list(document.devices).index(name),
        device=device,
        program=program,
        tasks=compile_tasks(document, program.memory, device, graphs, fixed=fixed),
        moves=MOVES,
        memberships=memberships(document) | {relay.task: part for relay, part in relays.items()},
        constants={key: tensor.to(device) for key, tensor in constants.items()},
        wholes=wholes_of(document, constants),
    )


def wholes_of(document: Document, constants: Iterable[str]) -> dict[str, StateOrigin]:
    """Which part of which named whole each constant is, leaving out those without a name."""
    found = {name: _whole_of(document.tensors[name]) for name in constants}
    return {name: whole for name, whole in found.items() if whole is not None}


def _whole_of(info: TensorInfo) -> StateOrigin | None:
    """The whole shape of a stored tensor is known where the file says it; else the part's end."""
    if info.value is None:
        return info.origin
    value = info.value
    shape = value.shape or tuple(end for _, end in value.placements)
    return StateOrigin(value.name, value.placements, shape)


def torch_device(name: str, device: Device) -> torch.device:
    """The device that a slot names. Raises DeviceError where this machine lacks it."""
    kind = DEVICE_KINDS[device.kind].torch
    if kind == "cpu":
        return torch.device(kind)
    if kind == "cuda":
        count = torch.cuda.device_count()
        if device.idx < count:
            return torch.device(kind, device.idx)
        raise DeviceError(
            f"device slot {name!r} is cuda {device.idx}, but this machine has {count} CUDA "
            "devices; run it where they are, or change the slot's kind to cpu in the file"
        )
    raise DeviceError(
        f"device slot {name!r} is of kind {device.kind!r}, which can be written, checked and shown "
        "but not run here; run it on the CPU with npu_as_cpu=True (--npu-as-cpu), or change the "
        "slot's kind to cpu or cuda in the file"
    )


# --- values -------------------------------------------------------------------------------------


class ValueOps:
    """What an engine does with values itself: of a run, with tensors.

    They are opaque to it otherwise; the simulator has values and operations of its own.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def space(self) -> dict[str, Any]:
        """Where values of a microbatch, or of a step, are kept by name."""
        return {}

    def place(self, value: Any) -> Any:
        """An input, on the slot's device."""
        return value.to(self._device)

    def split(self, value: Any, spec: TensorSpec, parts: int) -> Sequence[Any]:
        """An input's microbatches, along its leading dimension."""
        return [conform(part, spec) for part in value.unbind()]

    def storage(self, value: Any) -> object:
        """Which memory a value lies in."""
        return storage_of(value)

    def own(self, value: Any) -> Any:
        """The value in memory of its own."""
        return value.clone()

    def replace(self, old: Any, new: Any) -> Any:
        """What a constant is behind a call that replaces it.

        A copy: the caller of an in-process run may write to the tensors it gets.
        """
        return new.clone()
