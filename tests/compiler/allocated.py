"""What torch's allocator gives and takes while something runs, as its profiler tells."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from torch.profiler import ProfilerActivity, profile

from shardwright.compiler.memory.arena import align


def allocations(run: Callable[[], object]) -> list[int]:
    """The bytes of each tensor's memory as it is made, and less than 0 as it is given back."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = run()
    events = profiled.profiler.kineto_results.events()
    memory = sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns())
    del result
    return [event.nbytes() for event in memory]


def peak_of(run: Callable[[], object]) -> int:
    """The bytes that a run after the first one holds at once, at most, in whole lines.

    An arena has whole lines, too, and so has what the allocator gives.
    """
    run()
    whole = (align(size) if size > 0 else -align(-size) for size in allocations(run))
    return max(accumulate(whole), default=0)
