"""What drives a pipeline's slots: the part that `Runner` and `TrainingRunner` share.

`Start` chooses where slots run: in this process, in processes of their own, or as torchrun's rank.
A `Driver` holds the `Backend` from start to close. It may be used by several threads of the process
that made it.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

from msgspec.structs import replace

from shardwright.engine.generator import Generator, Slices
from shardwright.engine.program import is_training
from shardwright.engine.slot import torch_device
from shardwright.engine.timeline import Timeline
from shardwright.errors import LaunchError, RunError
from shardwright.launch.backend import Backend
from shardwright.launch.in_process import InProcess
from shardwright.launch.local import LocalProcesses
from shardwright.launch.operators import load_operators
from shardwright.launch.protocol import EngineOptions
from shardwright.launch.torchrun import TorchrunRank, is_torchrun, outputs_on_first_slot
from shardwright.launch.worker import Reply
from shardwright.pipeline import Device, Pipeline, check
from shardwright.runtime.contents import check_updates, shared_constants

T = TypeVar("T")


class LoadedProgram(NamedTuple):
    """A pipeline on the slots: its number, and what cuts and joins for it."""

    number: int
    generator: Generator
    pipeline: object
    """What was given; kept, as it may be known by its id."""


class Driver:
    """A pipeline on a backend, and others on the same slots; a context manager.

    ``in_flight`` is how many calls may be under way at once.
    """

    def __init__(self, pipeline: Pipeline, start: Start, backend: Backend, in_flight: int) -> None:
        self.pipeline = pipeline
        self._start = start
        self._slot = start.slot_of(pipeline)
        self._generator = Generator(pipeline, self._slot if is_training(pipeline) else None)
        self._backend = backend
        self._in_flight = in_flight
        self._loaded: dict[object, LoadedProgram] = {}
        self._loading = threading.Lock()
        self._under_way: deque[Future[Any]] = deque()
        self._beginning = threading.Lock()
        self._lock = threading.Lock()
        self._closed = False
        self._process = None if isinstance(backend, InProcess) else os.getpid()
        self._finalizer = weakref.finalize(self, _close, self._process, backend)

    @property
    def timeline(self) -> Timeline:
        """Who did what for how long in the calls that are over; empty without ``trace``."""
        return Timeline.of(self._backend.events())

    def close(self) -> None:
        """Finish the calls under way and end the workers."""
        self._close(abort=False)

    def call_workers(self, function: str, arguments: Any = None) -> dict[str, Any]:
        """Call a function of this package on every slot; what it returns, by slot.

        ``function`` is ``module:name`` and takes the `Slot`, ``arguments`` and a mapping of
        tensors, which is empty. It runs on the worker when all that was asked before is over.
        ``arguments`` and what it returns are plain data. An exception of any slot is raised here.
        """
        return {slot: reply.value for slot, reply in self._request(function, arguments).items()}

    def _request(
        self, function: str, arguments: Any, tensors: Slices | None = None
    ) -> dict[str, Reply]:
        asked = self._ask(lambda: self._backend.call_function(function, arguments, tensors))
        return self._backend.gather(asked.result())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close(abort=kind is not None)

    def _program(
        self,
        key: object,
        read: Callable[[], Pipeline],
        given: object,
        check_files: Callable[[], None] = lambda: None,
    ) -> LoadedProgram:
        """The program of a key: the pipeline that ``read`` gives, loaded at its first use.

        Its constants are the first pipeline's where they have the same names and placements.
        ``check_files`` raises where what the slots have read of files is not what was given. Raises
        what both raise, and RunError where it changes other state than the first.
        """
        with self._loading:
            if key not in self._loaded:
                prepared = self._start.arranged(read())
                shared = shared_constants(prepared, self.pipeline)
                check_updates(prepared, self.pipeline, shared)
                others = {k: info for k, info in prepared.tensors.items() if k not in shared}
                prepared.weights.check(others)
                number, loaded = self._ask(lambda: self._backend.load(prepared, shared))
                loaded.result()
                check_files()
                slot = self._slot if is_training(prepared) else None
                self._loaded[key] = LoadedProgram(number, Generator(prepared, slot), given)
            return self._loaded[key]

    def _ask(self, ask: Callable[[], T]) -> T:
        """Ask something of the backend; one thread at a time, so that all slots hear one order."""
        self._check_process()
        with self._lock:
            if self._closed:
                raise RunError("the runner is closed; make a new one")
            return ask()

    def _begin(self, begin: Callable[[], Future[Any]]) -> Future[Any]:
        """Begin a call; waits while ``in_flight`` calls are under way.

        One thread at a time begins: whoever else wants to would have to wait as well.
        """
        self._check_process()
        with self._beginning:
            while len(self._under_way) >= self._in_flight:
                self._under_way[0].exception()
                self._under_way.popleft()
            future = self._ask(begin)
            self._under_way.append(future)
        return future

    def _check_process(self) -> None:
        """Raise RunError in a forked copy of the process that has the threads and connections."""
        if not _is_here(self._process):
            name = type(self).__name__
            raise RunError(
                f"this {name} belongs to process {self._process}, of which this one ({os.getpid()})"
                f" is a fork: its workers answer there; make a {name} in this process, or fork "
                "before you make one"
            )

    def _close(self, *, abort: bool) -> None:
        self._closed = True
        if self._finalizer.detach() is not None and _is_here(self._process):
            try:
                self._backend.close(abort=abort)
            except BaseException:
                self._backend.close(abort=True)
                raise


def _is_here(process: int | None) -> bool:
    """Whether this is the process of that number; None is every process."""
    return process is None or process == os.getpid()


def _close(process: int | None, backend: Backend) -> None:
    """Close what nobody has closed, where it is."""
    if _is_here(process):
        backend.close(abort=True)


# --- starting -------------------------------------------------------------------------------------


def checked(
    pipeline: Pipeline | str | Path, modules: Sequence[str] = (), *, weights: bool = True
) -> Pipeline:
    """The pipeline, known to be right, with operators and (if wanted) weights that are there.

    Raises PipelineError, WeightError, RunError.
    """
    if isinstance(pipeline, Pipeline):
        check(pipeline)
    else:
        pipeline = Pipeline.load(pipeline)
    if weights:
        pipeline.weights.check(pipeline.tensors)
    load_operators(pipeline, modules)
    if pipeline.requires:
        check(pipeline)  # Graphs that call operators of these modules could not be proved before.
    return pipeline


@dataclass(frozen=True, slots=True)
class Start:
    """Where slots are to run, and what workers import.

    ``npu_as_cpu`` runs slots of the kind ``npu`` on the CPU.
    """

    in_process: bool = False
    modules: Sequence[str] = ()
    npu_as_cpu: bool = False

    @property
    def is_rank(self) -> bool:
        """Whether this process is one of torchrun's ranks, and runs one slot."""
        return is_torchrun() and not self.in_process

    def slot_of(self, pipeline: Pipeline) -> str | None:
        """The slot that this process drives, as a rank; None where it drives all."""
        return list(pipeline.devices)[int(os.environ["RANK"])] if self.is_rank else None

    def arranged(self, pipeline: Pipeline) -> Pipeline:
        """The pipeline as it runs here.

        As a rank, outputs of calls come to the first slot; npu slots are CPU slots where asked.
        """
        if self.npu_as_cpu:
            pipeline = _npu_as_cpu(pipeline)
        moved = self.is_rank and not is_training(pipeline)
        return outputs_on_first_slot(pipeline) if moved else pipeline

    def __call__(self, pipeline: Pipeline, options: EngineOptions, timeout: float) -> Backend:
        """Start all slots. Raises RunError and its kinds; no process is left then."""
        _check_numbers(timeout, options.threads)
        if self.is_rank:
            return TorchrunRank(pipeline, options, timeout)
        _check_devices(pipeline)
        if self.in_process:  # On one machine, whichever hosts the slots are of.
            return InProcess(pipeline, options)
        _check_host(pipeline)
        return LocalProcesses(pipeline, options, self.modules, timeout)


def _check_numbers(timeout: float, threads: int) -> None:
    """Raise RunError where workers could do nothing in so much time, or with so many threads."""
    if not timeout > 0:
        raise RunError(f"timeout={timeout}; workers wait for each other for seconds above 0")
    if threads < 1:
        raise RunError(f"threads={threads}; a worker computes with at least one thread")


def _npu_as_cpu(pipeline: Pipeline) -> Pipeline:
    """The pipeline with CPU slots in place of those of the kind npu."""
    devices = pipeline.devices
    free = count(1 + max((d.idx for d in devices.values() if d.kind == "cpu"), default=-1))
    found = replace(
        pipeline,
        devices={
            name: Device("cpu", next(free), device.host) if device.kind == "npu" else device
            for name, device in devices.items()
        },
    )
    found.weights, found.origin = pipeline.weights, pipeline.origin
    return found


def _check_devices(pipeline: Pipeline) -> None:
    """Raise DeviceError where this machine lacks a device."""
    for name, device in pipeline.devices.items():
        torch_device(name, device)


def _check_host(pipeline: Pipeline) -> None:
    """Raise LaunchError where slots are of several hosts."""
    hosts = sorted({device.host for device in pipeline.devices.values() if device.host})
    if len(hosts) > 1:
        raise LaunchError(
            f"the pipeline spans the hosts {', '.join(hosts)}; start it with torchrun on each, or "
            "try it on this one with in_process=True (--in-process)"
        )
