"""A lowered task as a program of flat tensors, as the engine runs them.

An output is in the memory of the input that was given away for it, or in new memory, never in
another input's; constants are read where they are; nothing is allocated in a run but outputs. Where
a run is recorded, inputs are copied to fixed addresses and outputs out of them, so a replay
overwrites nothing that a send still reads; constants, and what is given away, stay where they are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from shardwright.compiler.cuda_graphs import Record, RecordedRuns
from shardwright.compiler.executor import Executor
from shardwright.compiler.memory.plan import ExecPlan, make_exec_plan, optimize_plan
from shardwright.compiler.slots import SharedArena
from shardwright.kernels.lowered import LoweredGraph


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
