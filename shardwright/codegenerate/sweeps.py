"""Ways to go through all stages and microbatches of a call once: a thread a stage, or in order.

Comes in: a `Sweep`, which says what comes before what, and does one step. Goes out: nothing; every
step has been done, or the first failure is raised. What always holds: a stage goes through the
microbatches in the order of the sweep, and begins one when the stages before it have ended it; when
a call returns no thread works for it any more, also after a failure or an interrupt.

Threads belong to a `StageThreads`, stay for the next call, and end with it.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import NamedTuple, Self

import torch

from shardwright.errors import WorkerError


class Sweep(ABC):
    """Work that each stage does once a microbatch.

    what
        A word for it, in errors: ``forward``.
    stages, microbatches
        The order in which they come where nothing runs at one time.
    before
        For each stage those that must have done a microbatch first; all stand earlier in
        ``stages``.
    """

    what: str
    stages: Sequence[int]
    microbatches: Sequence[int]
    before: Sequence[Sequence[int]]

    @abstractmethod
    def step(self, stage: int, microbatch: int) -> None:
        """Do what a stage does of a microbatch."""


class Failure(NamedTuple):
    """What a step raised."""

    stage: int
    microbatch: int
    error: BaseException


def sweep_in_order(sweep: Sweep, state: ThreadState) -> None:
    """Go through a sweep in this thread, clock by clock as GPipe draws it.

    Of ``state`` only whether gradients are recorded differs from what this thread has.

    Of one clock the last stage comes first, so that what a device copies from another waits for
    nothing that is asked of that one later. Raises WorkerError.
    """
    with torch.set_grad_enabled(state.grad):
        for stage, microbatch in clocks(sweep.stages, sweep.microbatches):
            try:
                sweep.step(stage, microbatch)
            except Exception as error:
                _raise(Failure(stage, microbatch, error), sweep)


def clocks(stages: Sequence[int], microbatches: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Stages and microbatches in the order of GPipe's clock."""
    for clock in range(len(stages) + len(microbatches) - 1):
        for place in reversed(range(len(stages))):
            if 0 <= clock - place < len(microbatches):
                yield stages[place], microbatches[clock - place]


def _raise(failure: Failure, sweep: Sweep) -> None:
    error = failure.error
    if not isinstance(error, Exception):
        raise error
    raise WorkerError(
        f"{sweep.what}: {type(error).__name__}: {error}",
        stage=failure.stage,
        microbatch=failure.microbatch,
    ) from error


@dataclass(frozen=True, slots=True)
class ThreadState:
    """What torch keeps for each thread by itself.

    ``threads`` is with how many threads an operator runs.
    """

    grad: bool
    inference: bool
    threads: int
    autocast: bool
    autocast_dtype: torch.dtype
    autocast_cache: bool
    device: torch.device

    @classmethod
    def here(cls, *, grad: bool | None = None) -> Self:
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
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            stack.enter_context(
                torch.autocast(
                    "cpu",
                    dtype=self.autocast_dtype,
                    enabled=self.autocast,
                    cache_enabled=self.autocast_cache,
                )
            )
            if self.device != torch.get_default_device():
                stack.enter_context(self.device)
            yield


class _Progress:
    """How far the stages have come in a sweep; their threads wait here for one another."""

    def __init__(self, sweep: Sweep) -> None:
        self._done = dict.fromkeys(sweep.stages, 0)
        self._working = len(sweep.stages)
        self._changed = threading.Condition()
        self._stopped = False
        self.failure: Failure | None = None

    def reached(self, stages: Sequence[int], count: int) -> bool:
        """Wait until all of these have done more than ``count``; whether to go on."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._stopped or all(self._done[stage] > count for stage in stages)
            )
            return not self._stopped

    def advance(self, stage: int) -> None:
        """A stage has done one more."""
        with self._changed:
            self._done[stage] += 1
            self._changed.notify_all()

    def stop(self, failure: Failure | None = None) -> None:
        """Let no stage begin anything more. The first failure is kept."""
        with self._changed:
            if not self._stopped:
                self._stopped, self.failure = True, failure
            self._changed.notify_all()

    def leave(self) -> None:
        """A stage's thread works for this sweep no more."""
        with self._changed:
            self._working -= 1
            self._changed.notify_all()

    def wait_until_left(self) -> None:
        """Wait until all have left."""
        with self._changed:
            self._changed.wait_for(lambda: self._working == 0)


class StageThreads:
    """A thread a stage, begun with the first sweep. A copy has threads of its own."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._queues: list[SimpleQueue[_Job | None]] = []
        self._threads: list[threading.Thread] = []
        self._ordered = threading.Lock()
        self._threads_an_operator = 0
        self._end: Callable[[], object] = _nothing

    def __reduce__(self) -> tuple[type[Self], tuple[int]]:
        return type(self), (self._count,)

    @property
    def alive(self) -> int:
        """How many threads there are."""
        return sum(thread.is_alive() for thread in self._threads)

    def sweep(self, sweep: Sweep, state: ThreadState) -> None:
        """Go through a sweep, each stage in its thread, which computes in ``state``.

        The threads that an operator may use are shared out among the stages. Raises WorkerError.
        """
        whole, share = state.threads, max(1, state.threads // self._count)
        progress, shared = _Progress(sweep), replace(state, threads=share)
        try:
            with self._ordered:  # the same order in all queues: no call can wait for another
                self._begin()
                for stage, queue in enumerate(self._queues):
                    queue.put(_Job(sweep, stage, progress, shared))
            progress.wait_until_left()
        except BaseException:
            progress.stop()
            progress.wait_until_left()
            raise
        finally:
            if self._threads_an_operator != share:
                # A thread that sets its own number sets that of threads to come.
                self._threads_an_operator = share
                torch.set_num_threads(whole)
        if progress.failure is not None:
            _raise(progress.failure, sweep)

    def close(self) -> None:
        """End the threads; a later sweep begins others."""
        with self._ordered:
            self._end()
            for thread in self._threads:
                thread.join()
            self._threads = []

    def _begin(self) -> None:
        if self._threads and self.alive == len(self._threads):
            return
        self._threads_an_operator = 0
        self._queues = [SimpleQueue() for _ in range(self._count)]
        self._threads = [
            threading.Thread(target=_work, args=(queue,), name=f"stage {number}", daemon=True)
            for number, queue in enumerate(self._queues)
        ]
        for thread in self._threads:
            thread.start()
        self._end = weakref.finalize(self, _end_all, self._queues)


class _Job(NamedTuple):
    """All that one stage does in a sweep."""

    sweep: Sweep
    stage: int
    progress: _Progress
    state: ThreadState

    def __call__(self) -> None:
        microbatch = -1
        try:
            with self.state.entered():
                before = self.sweep.before[self.stage]
                for count, microbatch in enumerate(self.sweep.microbatches):
                    if not self.progress.reached(before, count):
                        return
                    self.sweep.step(self.stage, microbatch)
                    self.progress.advance(self.stage)
        except BaseException as error:
            self.progress.stop(Failure(self.stage, microbatch, error))
        finally:
            self.progress.leave()


def _work(queue: SimpleQueue[_Job | None]) -> None:
    """A stage's thread: do jobs until None comes. Nothing of a job is kept while it waits."""
    while (job := queue.get()) is not None:
        job()
        del job


def _nothing() -> None:
    """There are no threads to end."""


def _end_all(queues: Sequence[SimpleQueue[_Job | None]]) -> None:
    for queue in queues:
        queue.put(None)
