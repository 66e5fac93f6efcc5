"""A plan's calls bound: runs of native calls, and calls of torch between them.

Every call is in exactly one segment, by the native kernel where it takes the call, else by the
kind's torch kernel; a native segment is one call of C. A call carries its number and kind from when
it is bound, and a run that is given a log writes them there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import groupby
from time import perf_counter

import torch

from shardwright.compiler.memory.plan import ExecPlan
from shardwright.compiler.slots import PlanMemory
from shardwright.errors import ExecError
from shardwright.kernels.kinds import bind_torch, kind_of
from shardwright.kernels.lowered import LoweredOp
from shardwright.kernels.native.library import (
    BoundCall,
    CallLog,
    Library,
    LoggedCall,
    NativeOperand,
)
from shardwright.kernels.row import ABSENT, Closure, KernelRow, present


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
    return kind.schema(1).pack(attrs) if kind.schemas else b""


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
