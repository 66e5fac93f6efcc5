"""A plan's calls bound: runs of native calls, and calls of torch between them.

Comes in: a plan, its memory and the native library, if there is one. Goes out: `Segment`s in the
calls' order. What always holds: every call is in exactly one segment, by the native kernel where it
takes the call, else by the kind's torch kernel; a native segment is one call of C. A call carries
its number and kind from when it is bound, and a run that is given a log writes them there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from time import perf_counter
from typing import NamedTuple

import torch

from shardwright.compiler.memory.plan import ExecPlan
from shardwright.compiler.slots import Memory
from shardwright.errors import ExecError
from shardwright.kernels.kinds import bind_torch, kind_of
from shardwright.kernels.lowered import LoweredOp
from shardwright.kernels.native.library import (
    Bound,
    CallLog,
    Library,
    LoggedCall,
    NativeOperand,
    Program,
)
from shardwright.kernels.row import ABSENT, Closure, KernelRow, present


class NativeSegment:
    """Native calls that follow one another; ``first`` is the number of the first call."""

    def __init__(self, library: Library, first: int, bounds: Sequence[Bound], work_at: int) -> None:
        self.first = first
        self.count = len(bounds)
        self.bounds = tuple(bounds)
        self._program: Program = library.program(bounds, work_at)

    @property
    def work_bytes(self) -> int:
        """How much memory its calls work in, behind the plan's values in the arena."""
        return self._program.work_bytes

    def run(self, memory: Memory, threads: int, log: CallLog | None = None) -> None:
        """All its calls, by one call of C."""
        self._program.run(memory.bases, threads, log)

    def prepare(self, memory: Memory, threads: int) -> None:
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
            sorted({plan.allocations[v].buffer for v in (*op.in_vids, *op.out_vids) if v != ABSENT})
            for op in ops
        ]
        self._calls: list[TorchCall | None] = [None] * len(ops)
        self._versions: list[tuple[int, ...]] = [()] * len(ops)
        self._seen = -1

    def touches(self) -> set[int]:
        """The buffers that its calls read or write."""
        return {buffer for buffers in self._buffers for buffer in buffers}

    def run(self, memory: Memory, threads: int, log: CallLog | None = None) -> None:
        """All its calls in turn."""
        calls = self._bound(memory)
        for call in calls if log is None else [_logged(one, memory.device, log) for one in calls]:
            call()

    def _bound(self, memory: Memory) -> list[TorchCall]:
        """Its calls, on the memory's present addresses."""
        if self._seen != memory.changes:
            for k, op in enumerate(self._ops):
                version = tuple(memory.version[buffer] for buffer in self._buffers[k])
                if self._calls[k] is None or version != self._versions[k]:
                    self._calls[k] = _bind(op, self.first + k, memory)
                    self._versions[k] = version
            self._seen = memory.changes
        return self._calls  # type: ignore[return-value]


Segment = NativeSegment | TorchSegment


@dataclass(frozen=True, slots=True)
class Segments:
    """All segments in order, and why calls are torch's: the kernel's reason by call number."""

    segments: tuple[Segment, ...]
    refused: Mapping[int, str]


def bind_segments(plan: ExecPlan, library: Library | None) -> Segments:
    """The calls of a plan, bound."""
    operands = _Operands(plan)
    bound: list[Bound | None] = []
    refused: dict[int, str] = {}
    for index, op in enumerate(plan.calls):
        if library is None:
            found: Bound | str = "there are no native kernels"
        else:
            found = _native(library, op, index, operands)
        bound.append(found if isinstance(found, Bound) else None)
        if isinstance(found, str):
            refused[index] = found
    segments: list[Segment] = []
    for native, group in groupby(range(len(bound)), key=lambda k: bound[k] is not None):
        numbers = list(group)
        if native and library is not None:
            calls = [item for k in numbers if (item := bound[k]) is not None]
            segments.append(NativeSegment(library, numbers[0], calls, plan.work_at))
        else:
            ops = [plan.calls[k] for k in numbers]
            segments.append(TorchSegment(plan, numbers[0], ops))
    return Segments(tuple(segments), refused)


class _Operands:
    """What native kernels are told of values, each made once."""

    def __init__(self, plan: ExecPlan) -> None:
        self._plan = plan
        self._known: dict[int, NativeOperand] = {}
        self._static = {k for k, buffer in enumerate(plan.buffers) if buffer.vid in plan.static}

    def of(self, vid: int) -> NativeOperand | None:
        if vid == ABSENT:
            return None
        if vid not in self._known:
            home = self._plan.allocations[vid]
            self._known[vid] = NativeOperand(
                home.buffer,
                home.offset,
                self._plan.lowered.values[vid].dtype,
                home.shape,
                home.strides,
                home.buffer in self._static,
            )
        return self._known[vid]


def _native(library: Library, op: LoweredOp, number: int, operands: _Operands) -> Bound | str:
    """The native kernel's answer. Kernels always get attributes written out (schema 1)."""
    kind = kind_of(op.kind_id)
    if kind.name == "generic":
        return "an operator of torch"
    described = [operands.of(vid) for vid in (*op.in_vids, *op.out_vids)]
    blob = written_out(kind, op)
    return library.bind(op.kind_id, 1, blob, described, len(op.in_vids), number=number)


def written_out(kind: KernelRow, op: LoweredOp) -> bytes:
    """A call's attributes by the kind's first schema; empty where the kind has none.

    Raises ExecError for attributes that the kind cannot read.
    """
    try:
        attrs = kind.unpack(op.attr_schema, op.attr_blob)
    except ExecError as error:
        raise ExecError(f"{op.where}: {error}" if op.where else str(error)) from None
    return kind.schema(1).pack(attrs) if kind.schemas else b""


def _bind(op: LoweredOp, number: int, memory: Memory) -> TorchCall:
    kind = kind_of(op.kind_id)
    ins, outs = (
        [None if vid == ABSENT else memory[vid] for vid in vids]
        for vids in (op.in_vids, op.out_vids)
    )
    closure = bind_torch(kind.name, kind.unpack(op.attr_schema, op.attr_blob), ins, outs)
    where = f"{kind.name}, {op.where}" if op.where else kind.name
    return TorchCall(closure, present(outs), number, op.kind_id, where)


class TorchCall:
    """A bound call of torch, which knows which one it is; its exceptions say where it came from.

    At its first run it is seen whether its outputs stay where they are, and as large.
    """

    __slots__ = ("_call", "_homes", "_outs", "_where", "kind_id", "number")

    def __init__(
        self, call: Closure, outs: Sequence[torch.Tensor], number: int, kind_id: int, where: str
    ) -> None:
        self._call, self._outs, self._where = call, outs, where
        self._homes: list[_Home] | None = [_home(out) for out in outs]
        self.number, self.kind_id = number, kind_id

    def __call__(self) -> None:
        """Make the call. Raises ExecError where it moves what it is to write to."""
        try:
            self._call()
            if self._homes is not None:
                self._check_homes(self._homes)
        except Exception as error:
            error.add_note(f"in {self._where}")
            raise

    def _check_homes(self, homes: Sequence[_Home]) -> None:
        for out, home in zip(self._outs, homes, strict=True):
            if (found := _home(out)) != home:
                raise ExecError(
                    f"call {self.number}, {self._where}, moved what it was to write to: {home} "
                    f"became {found}; its values are not as its operands ask for. Lower the "
                    "pipeline again, or report the operator"
                )
        self._homes = None


class _Home(NamedTuple):
    """How and where a slot lies."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def __str__(self) -> str:
        return f"{list(self.shape)} with strides {list(self.strides)} at {self.address:#x}"


def _home(tensor: torch.Tensor) -> _Home:
    return _Home(tensor.data_ptr(), tuple(tensor.shape), tensor.stride())


def _logged(call: TorchCall, device: torch.device, log: CallLog) -> Callable[[], None]:
    """The call, which writes down that it was made."""

    def make() -> None:
        seconds = _timed(call, device)
        log.append(LoggedCall(call.number, call.kind_id, False, seconds))

    return make


def _timed(call: TorchCall, device: torch.device) -> float:
    """The seconds that a call takes, with its work on a device, where that can be waited for."""
    begin = perf_counter()
    call()
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize(device)
    return perf_counter() - begin
