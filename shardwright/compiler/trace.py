"""What a run really called, beside what its plan says.

An entry of a `Trace` says what the call itself was bound as, not what the plan has in its place,
and was written by the loop that any run goes through; so a call that is left out, done twice, done
out of turn or by another's kernel is found by `check_trace`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from shardwright.compiler.memory.plan import ExecPlan
from shardwright.errors import ExecError
from shardwright.ir.tensor_meta import count_text
from shardwright.kernels.lowered import LoweredOp, kind_of
from shardwright.kernels.native.library import LoggedCall


@dataclass(frozen=True, slots=True)
class Called:
    """One call: the number and kind it was bound as, who did it, and how long it took.

    ``where`` is the node that the plan's call of this number came from.
    """

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
        lines = [f"{count_text(len(self.calls), 'call')}, {self.seconds * 1e6:.1f} µs"]
        for call in self.calls:
            who = "native" if call.native else "torch"
            time = f"{call.seconds * 1e6:.1f} µs"
            lines.append(f"  {call.index} {call.kind} {who} {time}  {call.where}".rstrip())
        return "\n".join(lines)


def trace_of(plan: ExecPlan, log: Iterable[LoggedCall]) -> Trace:
    """The trace of a log; where a call came from is looked up in the plan."""
    return Trace(tuple(_called(plan, entry) for entry in log))


def _called(plan: ExecPlan, entry: LoggedCall) -> Called:
    number, kind_id, native, seconds = entry
    where = plan.calls[number].where if number < len(plan.calls) else ""
    return Called(number, kind_of(kind_id).name, where, native, seconds)


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
