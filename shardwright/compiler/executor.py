"""The executor: a plan bound to memory, run again and again.

    executor = Executor(plan)
    executor.bind_and_alloc_slots({"x": x, **weights})
    (y,) = executor.run({"x": other})

Stored values that the graph updates have their new contents after a run, in place. Once bound, a
run on tensors at the same addresses does no work in Python but a step a segment, and allocates
nothing where all calls are native; outputs are copies unless the caller asks for slots, which the
next run overwrites.

Every call is in exactly one segment, by the native kernel where it takes the call, else by the
kind's torch kernel; a native segment is one call of C. A call carries its number and kind from when
it is bound, and a run that is given a log writes them there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import groupby
from time import perf_counter

import torch

from shardwright.compiler.feeds import Feeds
from shardwright.compiler.memory.plan import ExecPlan
from shardwright.compiler.slots import PlanMemory
from shardwright.errors import ExecError
from shardwright.kernels.lowered import LoweredOp, bind_torch, kind_of
from shardwright.kernels.native.library import (
    BoundCall,
    CallLog,
    Library,
    LoggedCall,
    NativeOperand,
    load,
)
from shardwright.kernels.row import ABSENT, KernelRow
from shardwright.kernels.torch_kernels import Closure, present


class Executor:
    """Runs one plan on one device; not from several threads at once.

    threads
        How many threads native calls may use; torch's number by default, asked at each run.
    native
        Whether native kernels are used where there are any; ``refused`` says why calls are torch's
        nevertheless, by call number.
    """

    def __init__(
        self,
        plan: ExecPlan,
        *,
        device: str | torch.device = "cpu",
        threads: int | None = None,
        native: bool = True,
    ) -> None:
        self.device = torch.device(device)
        self.threads = threads
        library = self._library() if native else None
        self.segments: tuple[Segment, ...]
        self.segments, self.refused = bind_segments(plan, library)
        worked = (s.work_bytes for s in self.segments if isinstance(s, NativeSegment))
        if work_bytes := max(worked, default=0):
            plan = replace(plan, work_bytes=work_bytes)
        self.plan = plan
        self.memory = PlanMemory(plan, self.device)
        self.feeds = Feeds(plan, self.memory)
        self.torch_buffers: frozenset[int] = frozenset(
            buffer
            for segment in self.segments
            if isinstance(segment, TorchSegment)
            for buffer in segment.touches()
        )
        """The buffers that torch's calls read or write: their addresses are known to closures."""
        self._has_torch = any(isinstance(segment, TorchSegment) for segment in self.segments)
        self._log: CallLog | None = None
        self._owned: Sequence[int] = [
            k for k, buffer in enumerate(plan.buffers) if buffer.kind == "output"
        ]
        self._fresh = frozenset(self._owned) - self.torch_buffers
        self._returned = [(vid, plan.allocations[vid].buffer) for vid in plan.lowered.outputs]

    def _library(self) -> Library | None:
        return load() if self.device.type == "cpu" else None

    # --- slots --------------------------------------------------------------------------------

    def bind_and_alloc_slots(self, feed: Mapping[str, torch.Tensor]) -> Mapping[int, torch.Tensor]:
        """Bind inputs and stored values by name; gives the slot of every value, by id.

        Raises InputError where something is missing, or is not as the plan has it.
        """
        self.feeds.bind(feed)
        self._complete()
        return self.memory

    def _complete(self) -> None:
        """See that every buffer has memory. Raises InputError for what was not fed."""
        self.feeds.check_complete()
        for buffer in self._owned:
            if self.memory.held(buffer) is None:
                self.memory.renew(buffer)

    def refresh(self) -> None:
        """Take over new contents of static values, which kernels may have packed."""
        for segment in self.segments:
            if isinstance(segment, NativeSegment):
                segment.prepare(self.memory, self.thread_count)
        self.feeds.rebound_static = False

    def prepare_static(self) -> None:
        """Let kernels read static values that were bound since they last did."""
        if self.feeds.rebound_static:
            self.refresh()

    # --- runs ---------------------------------------------------------------------------------

    def run(
        self, feed: Mapping[str, torch.Tensor] | None = None, *, copy: bool = True
    ) -> list[torch.Tensor]:
        """Run on what is fed now and what was bound before; gives the outputs in order.

        Without ``copy`` outputs are slots, which the next run overwrites. Raises InputError.
        """
        self.bind_and_alloc_slots({} if feed is None else feed)
        if copy:
            for buffer in self._fresh:
                self.memory.renew(buffer)
        self.run_bound()
        return self.outputs(copy=copy)

    def run_compiled(self, feed: Mapping[str, torch.Tensor] | None = None) -> list[torch.Tensor]:
        """Run on the slots that are bound, inputs fed now copied into them; gives the output slots.

        The road of replays: inputs are copied into memory of the executor's own, which stays where
        it is from one such run to the next. Raises InputError.
        """
        self.feeds.copy({} if feed is None else feed)
        self.run_bound()
        return self.outputs(copy=False)

    def run_bound(self) -> None:
        """The calls, on what is bound. Raises InputError where something is not."""
        self._complete()
        self.prepare_static()
        threads = self.thread_count
        if not self._has_torch:
            for segment in self.segments:
                segment.run(self.memory, threads, self._log)
            return
        with torch.inference_mode():
            for segment in self.segments:
                segment.run(self.memory, threads, self._log)

    @contextmanager
    def logging(self) -> Iterator[CallLog]:
        """What runs call inside of it, in order; an entry is written when its call has returned."""
        before, self._log = self._log, []
        try:
            yield self._log
        finally:
            self._log = before

    def outputs(self, *, copy: bool = True) -> list[torch.Tensor]:
        """The outputs of the last run, in order."""
        if not copy:
            return [self.memory[vid] for vid, _ in self._returned]
        given: set[int] = set()
        found = []
        for vid, buffer in self._returned:
            own = buffer in self._fresh and buffer not in given
            found.append(self.memory[vid] if own else self.memory[vid].clone())
            given.add(buffer)
        return found

    @property
    def thread_count(self) -> int:
        """How many threads native calls use now."""
        return self.threads or torch.get_num_threads()

    def first_outputs(self, fresh: Collection[int]) -> set[int]:
        """The positions of outputs that are the first in one of these buffers."""
        found: dict[int, int] = {}
        for k, (_, buffer) in enumerate(self._returned):
            if buffer in fresh:
                found.setdefault(buffer, k)
        return set(found.values())


# --- segments: runs of native calls, and calls of torch between them ------------------------------


class NativeSegment:
    """Native calls that follow one another; ``first`` is the number of the first call."""

    def __init__(
        self, library: Library, first: int, bounds: Sequence[BoundCall], work_at: int
    ) -> None:
        self.first = first
        self.count = len(bounds)
        self.bounds = tuple(bounds)
        self._program = library.program(bounds, work_at)

    @property
    def work_bytes(self) -> int:
        """How much memory its calls work in, behind the plan's values in the arena."""
        return self._program.work_bytes

    def run(self, memory: PlanMemory, threads: int, log: CallLog | None = None) -> None:
        """All its calls, by one call of C."""
        self._program.run(memory.bases, threads, log)

    def prepare(self, memory: PlanMemory, threads: int) -> None:
        """Let kernels read their static operands."""
        for bound in self.bounds:
            bound.prepare(memory.bases, threads)


class TorchSegment:
    """Calls of torch that follow one another, on slots; bound again where an address changed."""

    def __init__(self, plan: ExecPlan, first: int, ops: Sequence[LoweredOp]) -> None:
        self.first = first
        self.count = len(ops)
        self._ops = ops
        self._buffers = [
            sorted({plan.allocations[vid].buffer for vid in (*op.reads, *op.makes)}) for op in ops
        ]
        self._calls: list[TorchCall | None] = [None] * len(ops)
        self._versions: list[tuple[int, ...]] = [()] * len(ops)
        self._seen = -1

    def touches(self) -> set[int]:
        """The buffers that its calls read or write."""
        return {buffer for buffers in self._buffers for buffer in buffers}

    def run(self, memory: PlanMemory, threads: int, log: CallLog | None = None) -> None:
        """All its calls in turn."""
        calls = self._bound(memory)
        for call in calls if log is None else [_logged(one, memory.device, log) for one in calls]:
            call()

    def _bound(self, memory: PlanMemory) -> list[TorchCall]:
        """Its calls, on the memory's present addresses."""
        if self._seen != memory.changes:
            for k, op in enumerate(self._ops):
                version = tuple(memory.version[buffer] for buffer in self._buffers[k])
                if self._calls[k] is None or version != self._versions[k]:
                    self._calls[k] = TorchCall(op, self.first + k, memory)
                    self._versions[k] = version
            self._seen = memory.changes
        return self._calls  # type: ignore[return-value]


Segment = NativeSegment | TorchSegment


def bind_segments(
    plan: ExecPlan, library: Library | None
) -> tuple[tuple[Segment, ...], dict[int, str]]:
    """The calls of a plan, bound, in order; and why calls are torch's, by call number."""
    static = {k for k, buffer in enumerate(plan.buffers) if buffer.vid in plan.static}

    @cache
    def operand(vid: int) -> NativeOperand | None:
        if vid == ABSENT:
            return None
        place = plan.allocations[vid]
        dtype = plan.lowered.values[vid].dtype
        is_static = place.buffer in static
        return NativeOperand(
            place.buffer, place.offset, dtype, place.shape, place.strides, is_static
        )

    bound: list[BoundCall | None] = []
    refused: dict[int, str] = {}
    for number, op in enumerate(plan.calls):
        operands = [operand(vid) for vid in (*op.in_vids, *op.out_vids)]
        found = _bind_native(library, op, number, operands)
        bound.append(found if isinstance(found, BoundCall) else None)
        if isinstance(found, str):
            refused[number] = found
    segments: list[Segment] = []
    for native, group in groupby(range(len(bound)), key=lambda k: bound[k] is not None):
        numbers = list(group)
        if native and library is not None:
            calls = [item for k in numbers if (item := bound[k]) is not None]
            segments.append(NativeSegment(library, numbers[0], calls, plan.work_at))
        else:
            segments.append(TorchSegment(plan, numbers[0], [plan.calls[k] for k in numbers]))
    return tuple(segments), refused


def _bind_native(
    library: Library | None,
    op: LoweredOp,
    number: int,
    operands: Sequence[NativeOperand | None],
) -> BoundCall | str:
    """The native kernel's answer. Kernels always get attributes written out (schema 1)."""
    kind = kind_of(op.kind_id)
    if library is None:
        return "there are no native kernels"
    if kind.name == "generic":
        return "an operator of torch"
    blob = written_out(kind, op)
    return library.bind(op.kind_id, 1, blob, operands, len(op.in_vids), number=number)


def written_out(kind: KernelRow, op: LoweredOp) -> bytes:
    """A call's attributes by the kind's first schema; empty where the kind has none.

    Raises ExecError for attributes that the kind cannot read.
    """
    try:
        attrs = kind.unpack(op.attr_schema, op.attr_blob)
    except ExecError as error:
        raise ExecError(f"{op.where}: {error}" if op.where else str(error)) from None
    return kind.attrs.pack(attrs)


class TorchCall:
    """A bound call of torch, which knows which one it is; its exceptions say where it came from.

    At its first run it is seen whether its outputs stay where they are, and as large.
    """

    __slots__ = ("_call", "_layouts", "_outs", "_where", "kind_id", "number")

    def __init__(self, op: LoweredOp, number: int, memory: Mapping[int, torch.Tensor]) -> None:
        kind = kind_of(op.kind_id)
        ins, outs = (
            [None if vid == ABSENT else memory[vid] for vid in vids]
            for vids in (op.in_vids, op.out_vids)
        )
        attrs = kind.unpack(op.attr_schema, op.attr_blob)
        self._call: Closure = bind_torch(kind.name, attrs, ins, outs)
        self._outs = present(outs)
        self._where = f"{kind.name}, {op.where}" if op.where else kind.name
        self._layouts: list[_Layout] | None = [*map(_layout, self._outs)]
        self.number, self.kind_id = number, op.kind_id

    def __call__(self) -> None:
        """Make the call. Raises ExecError where it moves what it is to write to."""
        try:
            self._call()
            if self._layouts is not None:
                self._check_layouts(self._layouts)
        except Exception as error:
            error.add_note(f"in {self._where}")
            raise

    def _check_layouts(self, layouts: Sequence[_Layout]) -> None:
        for out, layout in zip(self._outs, layouts, strict=True):
            if (found := _layout(out)) != layout:
                before, after = (
                    f"{list(shape)} with strides {list(strides)} at {address:#x}"
                    for address, shape, strides in (layout, found)
                )
                raise ExecError(
                    f"call {self.number}, {self._where}, moved what it was to write to: {before} "
                    f"became {after}; its values are not as its operands ask for. Lower the "
                    "pipeline again, or report the operator"
                )
        self._layouts = None


_Layout = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Address, shape and strides."""


def _layout(tensor: torch.Tensor) -> _Layout:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


def _logged(call: TorchCall, device: torch.device, log: CallLog) -> Callable[[], None]:
    """The call, which writes down that it was made, and how long it took.

    With its work on a device, where that can be waited for.
    """

    def make() -> None:
        begin = perf_counter()
        call()
        if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize(device)
        log.append(LoggedCall(call.number, call.kind_id, False, perf_counter() - begin))

    return make
