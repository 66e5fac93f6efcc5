"""The supertasks of a slot compiled to programs of flat tensors, as the engine runs them.

Supertasks that share a graph, the shapes they bind and what they overwrite share one program;
lowered ones share a plan, and all of a slot's one arena, as they run one at a time; on a GPU they
are recorded, and all of a slot's recordings share one pool.

An output of a lowered one is in the memory of the input that was given away for it, or in new
memory, never in another input's; constants are read where they are; nothing is allocated in a run
but outputs. Where a run is recorded, inputs are copied to fixed addresses and outputs out of them,
so a replay overwrites nothing that a send still reads; constants, and what is given away, stay
where they are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.comm.transport import Membership, TensorSpec, memberships
from shardwright.comm.wire import conform
from shardwright.compiler.cuda_graphs import GraphMemory, Record, RecordedRuns
from shardwright.compiler.executor import Executor
from shardwright.compiler.memory.plan import ExecPlan, make_exec_plan, optimize_plan
from shardwright.compiler.slots import SharedArena
from shardwright.engine.program import Relay, slot_program
from shardwright.engine.replacement import MemoryUse
from shardwright.engine.slot import MOVES, CompiledTask, LoadedSlot, Run, torch_device, wholes_of
from shardwright.errors import InputError
from shardwright.ir import IRGraph
from shardwright.ir.execute import compile_graph
from shardwright.ir.tensor_meta import describe_dtype, tensor_text, torch_dtype
from shardwright.kernels.files import decode
from shardwright.kernels.lowered import LoweredGraph
from shardwright.pipeline.graphs import TaskGraphs
from shardwright.pipeline.schema import Document


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


# --- lowered supertasks ----------------------------------------------------------------------


def plan_task(
    lowered: LoweredGraph, donated: Mapping[int, int] | None = None, fixed: Collection[int] = ()
) -> ExecPlan:
    """The plan of a task; positions say which inputs become which outputs, which are fixed."""
    given = {lowered.inputs[old]: lowered.outputs[new] for old, new in (donated or {}).items()}
    used = {vid for op in lowered.ops for vid in op.in_vids}
    static = used.intersection(lowered.inputs[k] for k in fixed)
    plan = make_exec_plan(lowered, donated=given, static=static, outputs="caller")
    return optimize_plan(plan)


class TaskProgram:
    """One task's program: ``program(tensors)`` takes and gives flat lists.

    constants
        Positions of inputs that are the same tensor at each run.
    donated
        Input's position to that of the output that takes its memory.
    arena
        Shared with the slot's other programs.
    record
        Records runs, on a GPU; without it calls are made one by one. All of them are torch's then.
    """

    def __init__(
        self,
        plan: ExecPlan,
        device: torch.device,
        arena: SharedArena,
        *,
        constants: Collection[int] = (),
        donated: Mapping[int, int] | None = None,
        threads: int | None = None,
        record: Record | None = None,
    ) -> None:
        self._executor = Executor(plan, device=device, threads=threads, native=record is None)
        self.plan = plan = self._executor.plan
        memory = self._executor.memory
        arena.lend(memory, plan.memory_bytes)
        lowered = plan.lowered
        self._names = [lowered.values[vid].name for vid in lowered.inputs]
        buffers = {buffer.vid: k for k, buffer in enumerate(plan.buffers)}
        torchs = self._executor.torch_buffers
        self._taken = {new: old for old, new in (donated or {}).items()}
        kept = {*constants, *(donated or {})}
        self._copied = {
            k: memory.own(buffers[vid])
            for k, vid in enumerate(lowered.inputs)
            if k not in kept and vid in buffers and buffers[vid] in torchs
        }
        self._last: list[Tensor | None] = [None] * len(self._names)
        self._fresh = [
            k
            for k, buffer in enumerate(plan.buffers)
            if buffer.kind == "output" and k not in torchs
        ]
        self._own = self._executor.first_outputs(self._fresh)
        self._recording = RecordedRuns(self._executor, record) if record is not None else None

    @property
    def unrecorded(self) -> str | None:
        """Why its calls are made one by one; None where runs are recorded."""
        return self._recording.reason if self._recording else "nothing is recorded on the CPU"

    @property
    def kept_bytes(self) -> int:
        """Bytes that it has for itself from run to run, beside the arena.

        They are copies of inputs, and outputs at addresses that torch's calls know.
        """
        buffers = enumerate(self.plan.buffers)
        fixed = [b for k, b in buffers if b.kind == "output" and k not in self._fresh]
        copied = sum(tensor.nbytes for tensor in self._copied.values())
        return copied + sum(buffer.nbytes for buffer in fixed)

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Run on these tensors; gives the outputs, in order."""
        executor, feed, last = self._executor, {}, list(self._last)
        for k, tensor in enumerate(tensors):
            if (own := self._copied.get(k)) is not None:
                own.copy_(tensor)
                tensor = own
            if tensor is not last[k]:
                feed[self._names[k]] = last[k] = tensor
        self._last = [None] * len(last)  # a feed that is refused is given whole the next time
        executor.bind_and_alloc_slots(feed)
        self._last = last
        for buffer in self._fresh:
            executor.memory.renew(buffer)
        if self._recording is None:
            executor.run_bound()
        else:
            self._recording.run([tensors[old] for old in self._taken.values()])
        return [
            self._result(k, slot, tensors) for k, slot in enumerate(executor.outputs(copy=False))
        ]

    def _result(self, position: int, slot: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        """An output: the input that it took the place of, new memory, or a copy of a slot."""
        if position in self._taken:
            return tensors[self._taken[position]]
        return slot if position in self._own else slot.clone()


class FromZeros:
    """A program whose inputs at positions ``zeros``, which are given away, count as zeros."""

    def __init__(self, program: TaskProgram, zeros: Sequence[int]) -> None:
        self._program = program
        self._zeros = zeros

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Run."""
        with torch.no_grad():
            for position in self._zeros:
                tensors[position].zero_()
        return self._program(tensors)
