"""A prepared graph bound: optimized, lowered, planned, and given memory that never moves.

Stored values are bound to the program's own tensors, so that updates happen there, unless a feed
may replace them (`Replaying.copy_roles`). No address changes between runs, but those of large
inputs and outputs that no call of torch touches. On a GPU the run is a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from shardwright.compiler.cuda_graphs import WARM_UP, GraphMemory
from shardwright.compiler.executor import Executor
from shardwright.compiler.guards import is_counted
from shardwright.compiler.lowering import lower_graph
from shardwright.compiler.memory.plan import ExecPlan, make_exec_plan, optimize_plan
from shardwright.compiler.passes.pipeline import prepare
from shardwright.compiler.replay import Replaying, warm_up
from shardwright.compiler.slots import SharedArena
from shardwright.compiler.sources import Prepared
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
    _copies: FeedCopies = field(init=False)

    def __post_init__(self) -> None:
        self._arena = SharedArena(self.device)
        self._copies = FeedCopies()

    def __call__(self, prepared: Prepared, replaying: Replaying) -> BoundPlan:
        """Bind a prepared graph. Raises ExecError, DeviceError."""
        if self.device.type == "cuda":
            self._graphs = self._graphs or GraphMemory(self.device)
        bound = self._bound(prepared, replaying)
        if self._graphs is not None:
            bound.record(self._graphs, replaying.warm_up)
        else:
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


class FeedCopies:
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
    """Whether a copy of the tensor would have this one's dtype, shape and strides."""
    wanted = torch.empty_like(tensor, device="meta")
    same = copy.dtype == wanted.dtype and copy.shape == wanted.shape
    return same and copy.stride() == wanted.stride()


class BoundPlan:
    """A plan on memory of its own, and on the program's tensors.

    ``rereads`` says that all contents which it has taken are packed by kernels, from where they
    are: no constant was folded of them, and none was copied for feeds.
    """

    def __init__(
        self,
        executor: Executor,
        stored: Mapping[str, Tensor],
        copies: FeedCopies,
        *,
        rereads: bool = False,
    ) -> None:
        self.executor = executor
        self.plan = plan = executor.plan
        self._rereads = rereads
        self._copies = copies
        values, memory = plan.lowered.values, executor.memory
        buffers = {buffer.vid: k for k, buffer in enumerate(plan.buffers)}
        places = [buffers[vid] for vid in plan.lowered.inputs]
        self._names = [values[vid].name for vid in plan.lowered.inputs]
        self.inputs = [memory.own(place).zero_() for place in places]
        """The buffers that inputs are copied into, in order."""
        known = {values[b.vid].name for b in plan.buffers if b.kind == "stored"}
        self._stored = {name: tensor for name, tensor in stored.items() if name in known}
        own = dict(zip(self._names, self.inputs, strict=True))
        executor.bind_and_alloc_slots({**self._stored, **own})
        large = {
            k
            for k, buffer in enumerate(plan.buffers)
            if buffer.nbytes >= LARGE and k not in executor.torch_buffers
        }
        self._movable = [place in large for place in places]
        self._fresh = [k for k in large if plan.buffers[k].kind == "output"]
        self._new = executor.first_outputs(self._fresh)
        self._counted = [tensor for tensor in self.written if is_counted(tensor)]
        self._graph: RecordedPlan | None = None

    @property
    def written(self) -> list[Tensor]:
        """The stored tensors that a run changes."""
        names = {self.plan.lowered.values[vid].name for vid in self.plan.renewed}
        return [tensor for name, tensor in self._stored.items() if name in names]

    def run(self) -> list[Tensor]:
        """Run on the buffers; gives the slots of the outputs."""
        self.executor.run_bound()
        if self._counted:
            increment_version(self._counted)
        return self.executor.outputs(copy=False)

    def record(self, memory: GraphMemory, times: int | None) -> None:
        """Let runs be replays of a CUDA graph."""
        self._graph = RecordedPlan(self, memory, WARM_UP if times is None else times)

    def take_contents(self) -> bool:
        """Read stored values anew, whose contents have changed; False where it must be bound.

        Kernels pack anew, and what has other strides is copied anew, if that is all there is.
        """
        if self._rereads:
            self.executor.bind_and_alloc_slots(self._stored)
            self.executor.refresh()
        return self._rereads

    def __call__(self, inputs: Sequence[Tensor], *, slots: bool = False) -> list[Tensor]:
        """Run on inputs in the graph's order; gives its outputs, or the slots they are in."""
        if self._graph is not None:
            found = self._graph.replay(inputs)
            return found if slots else [slot.clone() for slot in found]
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

    @contextmanager
    def logging(self) -> Iterator[CallLog]:
        """What the runs inside of it call, in order; of a CUDA graph, the calls recorded."""
        if self._graph is not None:
            yield list(self._graph.log)
        else:
            with self.executor.logging() as log:
                yield log

    def feed(self, stored: Mapping[str, Tensor]) -> None:
        """Give stored values other contents, by any of their names."""
        own = self._copies.feed(stored)
        values = self.plan.lowered.values
        for buffer in self.plan.buffers if own else ():
            if buffer.kind == "stored":
                spec = values[buffer.vid]
                for name in own.keys() & {spec.name, *spec.names}:
                    self._stored[spec.name].copy_(own[name].detach())


class RecordedPlan:
    """A bound plan as a CUDA graph; ``log`` is what was called when it was recorded."""

    def __init__(self, bound: BoundPlan, memory: GraphMemory, times: int) -> None:
        self.log: CallLog = []
        self._bound = bound
        self._outputs: list[Tensor] = []
        self._replay = memory.record(self._run, bound.written, times)

    def _run(self) -> None:
        with self._bound.executor.logging() as self.log:
            self._outputs = self._bound.run()

    @torch.no_grad()
    def replay(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run once on these inputs; gives the slots of the outputs."""
        for buffer, given in zip(self._bound.inputs, inputs, strict=True):
            buffer.copy_(given, non_blocking=True)
        self._replay()
        return self._outputs
