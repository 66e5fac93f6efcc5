"""All stages and microbatches of a call, in one thread or in a thread a stage."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch

from shardwright.errors import WorkerError


class Traversal(NamedTuple):
    """Work that each stage does once a microbatch, in the order of one thread.

    ``before`` has for each stage those that must have done a microbatch first; all stand earlier
    in ``stages``. ``name`` is the work's in errors.
    """

    name: str
    stages: Sequence[int]
    microbatches: Sequence[int]
    before: Sequence[Sequence[int]]
    step: Callable[[int, int], None]

    def clocks(self) -> Iterator[tuple[int, int]]:
        """Stages and microbatches in the order of GPipe's clock cycles.

        Of one cycle the last stage comes first, so that what a device copies from another waits
        for nothing that is asked of that one later.
        """
        for clock in range(len(self.stages) + len(self.microbatches) - 1):
            for place in reversed(range(len(self.stages))):
                if 0 <= clock - place < len(self.microbatches):
                    yield self.stages[place], self.microbatches[clock - place]

    def failed(self, stage: int, microbatch: int, error: Exception) -> WorkerError:
        """What is raised where a step fails."""
        message = f"{self.name}: {type(error).__name__}: {error}"
        return WorkerError(message, stage=stage, microbatch=microbatch)


def run_in_order(traversal: Traversal, state: ThreadState) -> None:
    """Go through a traversal in this thread. Raises WorkerError."""
    with torch.set_grad_enabled(state.grad):
        for stage, microbatch in traversal.clocks():
            try:
                traversal.step(stage, microbatch)
            except Exception as error:
                raise traversal.failed(stage, microbatch, error) from error


class StageThreads:
    """A thread for each stage, begun with the first traversal; a copy has threads of its own.

    A stage goes through the microbatches in order, and begins one when the stages before it have
    ended it. When a call returns, or fails, no thread works for it any more.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._executors: list[ThreadPoolExecutor] = []
        self._process = os.getpid()
        self._submitting = threading.Lock()
        self._threads_per_operator = 0

    def __reduce__(self) -> tuple[type[Self], tuple[int]]:
        return type(self), (self._count,)

    def run(self, traversal: Traversal, state: ThreadState) -> None:
        """Go through a traversal; the operators' threads are divided among the stages.

        Raises WorkerError.
        """
        share = max(1, state.threads // self._count)
        progress = _Progress(traversal, replace(state, threads=share))
        jobs: list[Future[None]] = []
        try:
            with self._submitting:  # one order for all threads: no call can wait for another
                self._start()
                for stage, executor in enumerate(self._executors):
                    jobs.append(executor.submit(progress.run_stage, stage))
            wait(jobs)
        except BaseException:
            progress.stop()
            wait(jobs)
            raise
        finally:
            if self._threads_per_operator != share:
                # A thread that sets its own number sets that of threads to come.
                self._threads_per_operator = share
                torch.set_num_threads(state.threads)
        progress.raise_failure()

    def close(self) -> None:
        """End the threads; a later traversal begins others."""
        with self._submitting:
            for executor in self._executors:
                executor.shutdown()
            self._executors = []

    def _start(self) -> None:
        if self._executors and self._process == os.getpid():
            return
        self._process, self._threads_per_operator = os.getpid(), 0
        self._executors = [
            ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"stage {stage}")
            for stage in range(self._count)
        ]


class _Progress:
    """How far the stages have come in a traversal; their threads wait here for one another."""

    def __init__(self, traversal: Traversal, state: ThreadState) -> None:
        self._traversal, self._state = traversal, state
        self._done = Counter[int]()
        self._changed = threading.Condition()
        self._stopped = False
        self._failure: tuple[int, int, BaseException] | None = None

    def run_stage(self, stage: int) -> None:
        """All that one stage does."""
        microbatch = -1
        try:
            with self._state.entered():
                for count, microbatch in enumerate(self._traversal.microbatches):
                    if not self._wait_for(self._traversal.before[stage], count):
                        return
                    self._traversal.step(stage, microbatch)
                    with self._changed:
                        self._done[stage] += 1
                        self._changed.notify_all()
        except BaseException as error:
            self.stop((stage, microbatch, error))

    def stop(self, failure: tuple[int, int, BaseException] | None = None) -> None:
        """Let no stage begin anything more. The first failure is kept."""
        with self._changed:
            if not self._stopped:
                self._stopped, self._failure = True, failure
            self._changed.notify_all()

    def raise_failure(self) -> None:
        """Raise what the first step raised that failed."""
        if self._failure is not None:
            stage, microbatch, error = self._failure
            if not isinstance(error, Exception):
                raise error
            raise self._traversal.failed(stage, microbatch, error) from error

    def _wait_for(self, stages: Sequence[int], count: int) -> bool:
        """Wait until all of these have done more than ``count``; whether to go on."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._stopped or all(self._done[stage] > count for stage in stages)
            )
            return not self._stopped


@dataclass(frozen=True, slots=True)
class ThreadState:
    """What torch keeps for each thread by itself; ``threads`` is the number an operator uses."""

    grad: bool
    inference: bool
    threads: int
    autocast: bool
    autocast_dtype: torch.dtype
    autocast_cache: bool
    device: torch.device

    @classmethod
    def current(cls, *, grad: bool | None = None) -> Self:
        """The calling thread's; ``grad`` where operators shall record or not whatever it does."""
        return cls(
            grad=torch.is_grad_enabled() if grad is None else grad,
            inference=torch.is_inference_mode_enabled(),
            threads=torch.get_num_threads(),
            autocast=torch.is_autocast_enabled("cpu"),
            autocast_dtype=torch.get_autocast_dtype("cpu"),
            autocast_cache=torch.is_autocast_cache_enabled(),
            device=torch.get_default_device(),
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Compute in the block as that thread did."""
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        autocast = torch.autocast(
            "cpu",
            dtype=self.autocast_dtype,
            enabled=self.autocast,
            cache_enabled=self.autocast_cache,
        )
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            stack.enter_context(autocast)
            if self.device != torch.get_default_device():
                stack.enter_context(self.device)
            yield
