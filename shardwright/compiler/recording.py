"""A task's run recorded, and replayed where its memory is what it was.

Comes in: an executor whose calls are all torch's, and a `Record`, which is that of a GPU
(`cuda.GraphMemory.record`). Goes out: a `Recording`, called in place of `Executor.run_bound`.

What always holds: a replay runs on the addresses that it was recorded with, so other addresses get
a recording of their own, up to a bound; what cannot be recorded runs call by call, and `reason`
says why. To record changes nothing: neither what a run writes, nor random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardwright.compiler.executor import Executor
from shardwright.compiler.memory.plan import ExecPlan
from shardwright.ir.operators import resolve
from shardwright.kernels.kinds import BY_NAME, kind_of
from shardwright.kernels.lowered import LoweredGraph, LoweredOp

Record = Callable[[Callable[[], None], Sequence[Tensor]], Callable[[], None]]
"""From a run, and the tensors that it changes, to a function that replays it.

RuntimeError where it cannot be recorded.
"""
RECORDINGS = 8
"""For how many sets of addresses a task is recorded; more show that its inputs never stay."""

_INDEXING = {"index.Tensor", "index_put.default", "index_put_.default", "_index_put_impl_.default"}
"""Operators that look up on the host where a mask is true."""
_ON_THE_HOST = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Recording:
    """The runs of one executor, recorded at the first run with each set of addresses."""

    def __init__(self, executor: Executor, record: Record) -> None:
        self._executor = executor
        self._record = record
        self._replays: dict[bytes, Callable[[], None]] = {}
        self._replay: Callable[[], None] | None = None
        self._seen = -1
        self.reason = unrecordable(executor.plan)
        """Why calls are made one by one; None while they are replayed."""

    def run(self, written: Sequence[Tensor]) -> None:
        """Run on what is bound; ``written`` are the inputs that a run changes."""
        if self._seen != self._executor.memory.changes:
            self._replay = self._recorded(written) if self.reason is None else None
            self._seen = self._executor.memory.changes
        if self._replay is None:
            self._executor.run_bound()
        else:
            self._replay()

    def _recorded(self, written: Sequence[Tensor]) -> Callable[[], None] | None:
        """What replays the run at the present addresses; None, and a reason, where nothing can."""
        addresses = bytes(self._executor.memory.bases)
        found = self._replays.get(addresses)
        if found is not None:
            return found
        if len(self._replays) < RECORDINGS:
            try:
                self._replays[addresses] = self._record(self._executor.run_bound, written)
                return self._replays[addresses]
            except RuntimeError as error:
                self.reason = f"it could not be recorded: {error}"
        else:
            self.reason = f"constants of it have lain at more than {RECORDINGS} places"
        self._replays.clear()
        return None


def unrecordable(plan: ExecPlan) -> str | None:
    """Why a plan cannot be recorded: a call whose results the host must know; None if none is."""
    for op in plan.calls:
        name = _needs_host(plan.lowered, op)
        if name is not None:
            return f"{name} needs its results on the host{f', {op.where}' if op.where else ''}"
    return None


def _needs_host(lowered: LoweredGraph, op: LoweredOp) -> str | None:
    """The operator's name, where it waits for a device."""
    if op.kind_id != BY_NAME["generic"].id:
        return None
    name: str = kind_of(op.kind_id).unpack(op.attr_schema, op.attr_blob)["op"]
    if name.removeprefix("aten.") in _INDEXING:
        dtypes = {lowered.values[vid].dtype for vid in op.in_vids[1:] if vid in lowered.values}
        return name if dtypes & {"bool", "u8"} else None
    return name if _ON_THE_HOST.intersection(resolve(name).tags) else None
