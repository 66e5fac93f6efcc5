"""A prepared graph bound: optimized, lowered, planned, and given memory that never moves.

Comes in: a `Prepared`. Goes out: what `CompiledProgram` runs: a `BoundPlan` on the CPU, a
`BoundGraph` on a GPU. What always holds: stored values are bound to the program's own tensors,
so that updates happen there, unless a feed may replace them (`Replaying.copy_roles`); no address
changes between runs, but those of large inputs and outputs that no call of torch touches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from shardwright.compiler.captured import Bound
from shardwright.compiler.cuda import GraphMemory, RecordedGraph
from shardwright.compiler.executor import Executor
from shardwright.compiler.guards import is_counted
from shardwright.compiler.lowering import lower_graph
from shardwright.compiler.memory.plan import ExecPlan, make_exec_plan, optimize_plan
from shardwright.compiler.passes.pipeline import prepare
from shardwright.compiler.replay import Replaying, warm_up
from shardwright.compiler.slots import SharedArena
from shardwright.compiler.sources import Prepared
from shardwright.compiler.task_program import first_of_each, touched
from shardwright.ir import IRGraph, IRValue
from shardwright.ir.graph import without_collection
from shardwright.kernels.emitters import emit_graph
from shardwright.kernels.native.library import CallLog, load

LARGE = 1 << 16
"""Bytes from which on an input is read where it lies and an output is new memory, not a copy."""


@dataclass(slots=True)
class Binder:
    """Binds the captures of one program, which share an arena, for they run one at a time.

    What feeds replace they share too.

    threads
        How many threads native calls use; torch's number where it is None.
    """

    device: torch.device
    threads: int | None = None
    _graphs: GraphMemory | None = None
    _arena: SharedArena = field(init=False)
    _copies: Copies = field(init=False)

    def __post_init__(self) -> None:
        self._arena = SharedArena(self.device)
        self._copies = Copies()

    def __call__(self, prepared: Prepared, replaying: Replaying) -> Bound:
        """Bind a prepared graph. Raises ExecError, DeviceError."""
        if self.device.type == "cuda":
            self._graphs = self._graphs or GraphMemory(self.device)
            bound = self._bound(prepared, replaying)
            return BoundGraph(bound, self._graphs, replaying)
        bound = self._bound(prepared, replaying)
        warm_up(bound.run, replaying.warm_up or 0, bound.written, self.device)
        return bound

    @without_collection()
    def _bound(self, prepared: Prepared, replaying: Replaying) -> BoundPlan:
        graph = _optimized(prepared.graph, replaying, self.device)
        plan = plan_graph(graph, fixed=_fixed(graph, replaying))
        executor = Executor(plan, device=self.device, threads=self.threads)
        self._arena.lend(executor.memory, executor.plan.memory_bytes)
        folds = any(value.id not in prepared.graph.tensors for value in graph.stored())
        copies = any(value.role in replaying.copy_roles for value in graph.stored())
        stored = self._copies.contents(graph, replaying)
        return BoundPlan(executor, stored, self._copies, rereads=not folds and not copies)


def plan_graph(graph: IRGraph, fixed: Sequence[IRValue] = ()) -> ExecPlan:
    """The plan of a graph of operators; ``fixed`` are stored values that nobody changes."""
    lowered = lower_graph(emit_graph(graph))
    used = {vid for op in lowered.ops for vid in op.in_vids}
    static = [value.id for value in fixed if value.id in used]
    return optimize_plan(make_exec_plan(lowered, static=static, outputs="caller"))


def _optimized(graph: IRGraph, replaying: Replaying, device: torch.device) -> IRGraph:
    """The graph after all passes, which are shown only the contents that are there to stay."""
    shown = {v.id: graph.tensors[v.id] for v in graph.stored() if _is_fixed(graph, v, replaying)}
    inference = replaying.mode == "inference"
    chains = device.type == "cpu" and load() is not None
    shown_graph = replace(graph, tensors=shown)
    made = prepare(shown_graph, inference=inference, device=device, chains=chains)
    contents = graph.tensors | made.tensors
    made.tensors = {v.id: contents[v.id] for v in made.stored() if v.id in contents}
    return made


def _fixed(graph: IRGraph, replaying: Replaying) -> list[IRValue]:
    """The stored values whose contents are there to stay: in training everything may change."""
    if replaying.mode == "train":
        return []
    return [
        v for v in graph.stored() if _is_fixed(graph, v, replaying) and v.id not in graph.updates
    ]


def _is_fixed(graph: IRGraph, value: IRValue, replaying: Replaying) -> bool:
    """Whether a value's contents may become part of a plan: a change of them is noticed then."""
    return value.role in replaying.fixed and is_counted(graph.tensors[value.id])


class Copies:
    """Copies of the stored values that feeds replace: one of each, which all captures read.

    Constants are a capture's own: of other shapes they may be others under the same names.
    """

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}
        self._leading: dict[str, str] = {}
        """The name that a copy has here, by each of its names."""
        self._fed: set[str] = set()

    def contents(self, graph: IRGraph, replaying: Replaying) -> dict[str, Tensor]:
        """The tensors of stored values by name: the program's own, or copies."""
        return {
            value.name: self._copy(value, graph)
            if value.role in replaying.copy_roles
            else graph.tensors[value.id]
            for value in graph.stored()
        }

    def _copy(self, value: IRValue, graph: IRGraph) -> Tensor:
        """What was fed, or what runs made, as long as it fits; else what the program has now."""
        tensor = graph.tensors[value.id]
        if value.role == "constant":
            return tensor.clone()
        name = value.names[0]
        self._leading |= dict.fromkeys(value.names, name)
        copy = self._copies.get(name)
        if copy is None or not _is_alike(copy, tensor):
            self._fed.discard(name)
            copy = self._copies[name] = tensor.clone()
        elif name not in self._fed and value.id not in graph.updates:
            copy.copy_(tensor)
        return copy

    def feed(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Write what is fed, by any of a value's names; gives what there is no copy of here."""
        for name in stored.keys() & self._leading.keys():
            self._copies[self._leading[name]].copy_(stored[name].detach())
            self._fed.add(self._leading[name])
        return {name: t for name, t in stored.items() if name not in self._leading}


def _is_alike(copy: Tensor, tensor: Tensor) -> bool:
    """Whether a copy of the tensor would lie as this one does."""
    wanted = torch.empty_like(tensor, device="meta")
    return copy.dtype == wanted.dtype and _strided(copy) == _strided(wanted)


def _strided(tensor: Tensor) -> tuple[torch.Size, tuple[int, ...]]:
    """How a tensor lies."""
    return tensor.shape, tensor.stride()


class BoundPlan:
    """A plan on memory of its own, and on the program's tensors.

    ``rereads`` says that all contents which it has taken are packed by kernels, from where they
    lie: no constant was folded of them, and none was copied for feeds.
    """

    def __init__(
        self,
        executor: Executor,
        stored: Mapping[str, Tensor],
        copies: Copies,
        *,
        rereads: bool = False,
    ) -> None:
        self.executor = executor
        self._rereads = rereads
        self._copies = copies
        plan, memory = executor.plan, executor.memory
        values = plan.lowered.values
        self._names = [values[vid].name for vid in plan.lowered.inputs]
        self.inputs = [memory.own(_input_buffer(plan, name)).zero_() for name in self._names]
        """The buffers that inputs are copied into, in order."""
        known = {values[b.vid].name for b in plan.buffers if b.kind == "stored"}
        self._stored = {name: tensor for name, tensor in stored.items() if name in known}
        own = dict(zip(self._names, self.inputs, strict=True))
        executor.bind_and_alloc_slots({**self._stored, **own})
        free = set(range(len(plan.buffers))) - touched(executor)
        self._movable = [
            own[name].nbytes >= LARGE and _input_buffer(plan, name) in free for name in self._names
        ]
        self._fresh = [k for k in free if plan.buffers[k].kind == "output" and _is_large(plan, k)]
        self._new = first_of_each(plan, self._fresh)
        self._counted = [tensor for tensor in self.written if is_counted(tensor)]

    @property
    def plan(self) -> ExecPlan:
        """What runs."""
        return self.executor.plan

    @property
    def written(self) -> list[Tensor]:
        """The stored tensors that a run changes."""
        plan = self.plan
        names = {plan.lowered.values[vid].name for vid in plan.renewed}
        return [tensor for name, tensor in self._stored.items() if name in names]

    def run(self) -> list[Tensor]:
        """Run on the buffers; gives the slots of the outputs."""
        self.executor.run_bound()
        if self._counted:
            increment_version(self._counted)
        return self.executor.outputs(copy=False)

    def take_contents(self) -> bool:
        """Let kernels pack anew, and copy anew what lies otherwise, if that is all there is."""
        if self._rereads:
            self.executor.bind_and_alloc_slots(self._stored)
            self.executor.refresh()
        return self._rereads

    def __call__(self, inputs: Sequence[Tensor], *, slots: bool = False) -> list[Tensor]:
        """Run on these inputs."""
        for k, given in enumerate(inputs):
            if self._movable[k]:
                self.executor.feeds.bind({self._names[k]: given})
            else:
                self.inputs[k].copy_(given.detach() if given.requires_grad else given)
        memory = self.executor.memory
        for buffer in self._fresh:
            memory.renew(buffer)
        found = self.run()
        if slots:
            return found
        return [slot if k in self._new else slot.clone() for k, slot in enumerate(found)]

    def logging(self) -> AbstractContextManager[CallLog]:
        """What the runs inside of it call, in order."""
        return self.executor.logging()

    def feed(self, stored: Mapping[str, Tensor]) -> None:
        """Give stored values other contents, by any of their names."""
        own = self._copies.feed(stored)
        values = self.plan.lowered.values
        for buffer in self.plan.buffers if own else ():
            if buffer.kind == "stored":
                spec = values[buffer.vid]
                for name in own.keys() & {spec.name, *spec.names}:
                    self._stored[spec.name].copy_(own[name].detach())


def _input_buffer(plan: ExecPlan, name: str) -> int:
    named = (k for k, b in enumerate(plan.buffers) if b.kind == "input")
    return next(k for k in named if plan.lowered.values[plan.buffers[k].vid].name == name)


def _is_large(plan: ExecPlan, buffer: int) -> bool:
    return plan.buffers[buffer].nbytes >= LARGE


class BoundGraph:
    """A bound plan as a CUDA graph."""

    def __init__(self, bound: BoundPlan, memory: GraphMemory, replaying: Replaying) -> None:
        self._bound = bound
        self._log: CallLog = []
        self._recorded = RecordedGraph(
            self._run, bound.inputs, bound.written, memory, replaying.warm_up
        )

    def _run(self) -> list[Tensor]:
        """Run call by call, and keep what was called: at last, what was recorded."""
        with self._bound.logging() as self._log:
            return self._bound.run()

    @property
    def plan(self) -> ExecPlan:
        """What was recorded."""
        return self._bound.plan

    def __call__(self, inputs: Sequence[Tensor], *, slots: bool = False) -> list[Tensor]:
        """Replay on these inputs."""
        return self._recorded.replay(inputs, slots=slots)

    @contextmanager
    def logging(self) -> Iterator[CallLog]:
        """The calls that were recorded: a replay makes them all, unseen."""
        yield list(self._log)

    def feed(self, stored: Mapping[str, Tensor]) -> None:
        """Give stored values other contents."""
        self._bound.feed(stored)

    def take_contents(self) -> bool:
        """What was recorded reads stored values where they lie."""
        return self._bound.take_contents()
