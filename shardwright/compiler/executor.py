"""The executor: a plan bound to memory, run again and again.

    executor = Executor(plan)
    executor.bind_and_alloc_slots({"x": x, **weights})
    (y,) = executor.run({"x": other})

Stored values that the graph updates have their new contents after a run, in place. Once bound, a
run on tensors at the same addresses does no work in Python but a step a segment, and allocates
nothing where all calls are native; outputs are copies unless the caller asks for slots, which the
next run overwrites.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from shardwright.compiler.feeds import Feeds
from shardwright.compiler.memory.plan import ExecPlan
from shardwright.compiler.segments import NativeSegment, Segment, TorchSegment, bind_segments
from shardwright.compiler.slots import PlanMemory
from shardwright.kernels.native.library import CallLog, Library, load


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
