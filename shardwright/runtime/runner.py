"""The Runner: a pipeline, ready to be called.

    with sw.Runner("model.pipeline.json") as runner:
        output = runner(x)
        for output in runner.map(batches):
            ...

It checks the pipeline, loads it onto its device slots once and keeps it there between calls. Calls
take what the original model takes and give what it gives; several may be under way at once, and
finish in the order they began.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from shardwright.errors import LaunchError, RunError
from shardwright.pipeline import Pipeline, check
from shardwright.runtime.backend import Backend
from shardwright.runtime.generator import Generator
from shardwright.runtime.in_process import InProcess
from shardwright.runtime.operators import load_operators, modules_for_workers
from shardwright.runtime.processes import Processes
from shardwright.runtime.slot import torch_device
from shardwright.runtime.timeline import Timeline
from shardwright.runtime.torchrun import Rank, is_torchrun, outputs_on_first_slot


class Runner:
    """Runs a pipeline; a context manager, and callable like the original model.

    pipeline
        A `Pipeline` or the path of its file.
    in_process
        Run all slots in this process and thread instead of a process each. Under torchrun
        (RANK and WORLD_SIZE in the environment) this process is the slot of its rank.
    timeout
        Seconds in which something must move while calls are under way: the longest that one
        supertask may take.
    threads
        How many threads each worker computes with.
    trace
        Whether to record what `timeline` shows.
    modules
        Names of modules to import first, here and in each worker: those that register operators
        which the pipeline ``requires``.
    in_flight
        How many calls may be under way at once; twice the number of slots if not given.

    Raises PipelineError, WeightError, DeviceError or LaunchError; no process is left then.
    """

    def __init__(
        self,
        pipeline: Pipeline | str | Path,
        *,
        in_process: bool = False,
        timeout: float = 60.0,
        threads: int = 1,
        trace: bool = False,
        modules: Sequence[str] = (),
        in_flight: int | None = None,
    ) -> None:
        self.pipeline = _checked(pipeline)
        load_operators(self.pipeline, modules)
        make = _backend(in_process, self.pipeline)
        if make is Rank:
            self.pipeline = outputs_on_first_slot(self.pipeline)
        self._generator = Generator(self.pipeline)
        self._in_flight = in_flight or 2 * len(self.pipeline.devices)
        self._under_way: deque[Future[Any]] = deque()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._closed = False
        self._backend = _start(
            make, self.pipeline, timeout=timeout, threads=threads, trace=trace, modules=modules
        )
        self._finalizer = weakref.finalize(self, self._backend.close, abort=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one call and wait for its result. Raises InputError, or RunError and its kinds."""
        return self.submit(*args, **kwargs).result()

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Start a call; its future gives the result.

        Waits while ``in_flight`` calls are under way. Raises InputError where the arguments are not
        those of the original model.
        """
        inputs = self._generator.cut(args, kwargs)
        with self._lock:
            if self._closed:
                raise RunError("the runner is closed; make a new one")
            while self._under_way and self._under_way[0].done():
                self._under_way.popleft()
            if len(self._under_way) >= self._in_flight:
                self._under_way.popleft().exception()
            future = self._backend.begin(next(self._numbers), inputs, self._generator.join)
            self._under_way.append(future)
            return future

    def map(self, calls: Iterable[Any]) -> Iterator[Any]:
        """The results of many calls, in order, streamed through the slots.

        Each item is a tuple of positional arguments, a dict of keyword arguments, or the one
        argument itself. Items are taken ``in_flight`` ahead of the results.
        """
        under_way: deque[Future[Any]] = deque()
        for item in calls:
            args, kwargs = _arguments(item)
            under_way.append(self.submit(*args, **kwargs))
            if len(under_way) >= self._in_flight:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()

    @property
    def timeline(self) -> Timeline:
        """Who did what for how long in the calls that are over; empty without ``trace``."""
        return Timeline.of(self._backend.events())

    def close(self) -> None:
        """Finish the calls under way and end the workers."""
        self._close(abort=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close(abort=kind is not None)

    def _close(self, *, abort: bool) -> None:
        self._closed = True
        if self._finalizer.detach() is not None:
            try:
                self._backend.close(abort=abort)
            except BaseException:
                self._backend.close(abort=True)
                raise


def run(
    pipeline: Pipeline | str | Path,
    *args: Any,
    in_process: bool = False,
    timeout: float = 60.0,
    modules: Sequence[str] = (),
    **kwargs: Any,
) -> Any:
    """Run a pipeline once, as ``Runner(pipeline)(*args, **kwargs)``, and end its workers.

    A model whose own arguments are called like one of the options is run with `Runner`.
    """
    with Runner(pipeline, in_process=in_process, timeout=timeout, modules=modules) as runner:
        return runner(*args, **kwargs)


def _checked(pipeline: Pipeline | str | Path) -> Pipeline:
    """The pipeline, known to be right, with weights and devices that are there."""
    if isinstance(pipeline, Pipeline):
        check(pipeline)
    else:
        pipeline = Pipeline.load(pipeline)
    pipeline.weights.check(pipeline.tensors)
    return pipeline


def _backend(in_process: bool, pipeline: Pipeline) -> type[Backend]:
    if is_torchrun() and not in_process:
        return Rank
    for name, device in pipeline.devices.items():
        torch_device(name, device)
    hosts = sorted({device.host for device in pipeline.devices.values() if device.host})
    if len(hosts) > 1:
        raise LaunchError(
            f"the pipeline spans the hosts {', '.join(hosts)}; start it with torchrun on each"
        )
    return InProcess if in_process else Processes


def _start(
    make: Callable[..., Backend] | type[Backend],
    pipeline: Pipeline,
    *,
    modules: Sequence[str],
    timeout: float,
    **options: Any,
) -> Backend:
    if make is InProcess:
        return InProcess(pipeline, **options)
    if make is Rank:
        return Rank(pipeline, timeout=timeout, **options)
    modules = modules_for_workers(pipeline, modules)
    return Processes(pipeline, timeout=timeout, modules=modules, **options)


def _arguments(item: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    if isinstance(item, tuple):
        return item, {}
    if isinstance(item, dict) and not isinstance(item, Tensor):
        return (), item
    return (item,), {}
