"""What a run really called, beside what its plan says.

Comes in: a bound executor. Goes out: a `Trace`, one entry a call in the order in which they were
done. What always holds: an entry is written when its call has returned, so that a call that is left
out, done twice or out of turn is seen by `check_trace`. A traced run makes each native call by
itself, and gives the results that any run gives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch

from shardwright.errors import ExecError
from shardwright.exec.exec_plan import ExecPlan
from shardwright.exec.executor import Executor
from shardwright.exec.kinds import kind_of
from shardwright.exec.lowered import LoweredOp
from shardwright.exec.segments import NativeSegment


@dataclass(frozen=True, slots=True)
class Called:
    """One call: its number in the plan, its kind, who did it, and how long it took."""

    index: int
    kind: str
    where: str
    native: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class Trace:
    """The calls of one run, in order."""

    calls: tuple[Called, ...]

    @property
    def counts(self) -> Counter[str]:
        """How often each kind was called."""
        return Counter(call.kind for call in self.calls)

    @property
    def seconds(self) -> float:
        """The time of all calls."""
        return sum(call.seconds for call in self.calls)

    def __str__(self) -> str:
        lines = [f"{len(self.calls)} calls, {self.seconds * 1e6:.1f} µs"]
        for call in self.calls:
            who = "native" if call.native else "torch"
            time = f"{call.seconds * 1e6:.1f} µs"
            lines.append(f"  {call.index} {call.kind} {who} {time}  {call.where}".rstrip())
        return "\n".join(lines)


def trace_run(
    executor: Executor, feed: Mapping[str, torch.Tensor] | None = None, *, rounds: int = 1
) -> Trace:
    """Run once, call by call. ``rounds`` calls each so often for its least time.

    More than one round is for measuring alone: updates are then made more than once.
    Raises InputError where the feed does not fit.
    """
    executor.bind_and_alloc_slots(feed or {})
    executor.prepare_static()
    found = []
    with torch.inference_mode():
        for index, native, call in _calls(executor):
            seconds = min(_timed(call, executor.device) for _ in range(rounds))
            op = executor.plan.calls[index]
            found.append(Called(index, kind_of(op.kind_id).name, op.where, native, seconds))
    return Trace(tuple(found))


def _calls(executor: Executor) -> Iterator[tuple[int, bool, Callable[[], object]]]:
    """Each call's number, whether it is native, and the call."""
    memory, threads = executor.memory, executor.thread_count
    for segment in executor.segments:
        if isinstance(segment, NativeSegment):
            for k in range(segment.count):
                program = segment.single(k)
                yield segment.first + k, True, partial(program.run, memory.bases, threads)
        else:
            for k, closure in enumerate(segment.closures(memory)):
                yield segment.first + k, False, closure


def _timed(call: Callable[[], object], device: torch.device) -> float:
    """The seconds that a call takes, its work on a device included."""
    begin = perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter() - begin


def check_trace(plan: ExecPlan, trace: Trace) -> None:
    """Raise ExecError at the first call that is not the plan's, and where the number differs."""
    for place, (called, op) in enumerate(zip(trace.calls, plan.calls, strict=False)):
        if called.index != place or called.kind != kind_of(op.kind_id).name:
            raise ExecError(
                f"call {place} of plan {plan.lowered.name!r} is {_name(op)}, but call "
                f"{called.index} was made there, {called.kind} ({called.where})"
            )
    if len(trace.calls) != len(plan.calls):
        raise ExecError(
            f"plan {plan.lowered.name!r} has {len(plan.calls)} calls, but {len(trace.calls)} were "
            "made"
        )


def _name(op: LoweredOp) -> str:
    return f"{kind_of(op.kind_id).name} ({op.where})"
