"""The Runner: a pipeline, ready to be called.

    with sw.Runner("model.pipeline.json") as runner:
        output = runner(x)
        for output in runner.map(batches):
            ...

It checks the pipeline, loads it onto its device slots once and keeps it there between calls. Calls
take what the original model takes and give what it gives; several may be under way at once, and
finish in the order they began. A call may have fewer rows than the pipeline was captured with where
the model keeps rows apart (`Pipeline.rows_of`). Of a `Bundle` each call runs the pipeline for its
sizes; all of them are on the same slots, and share their constants.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwright.engine.program import is_training
from shardwright.errors import InputError, RunError, WeightError
from shardwright.launch.backend import Finish
from shardwright.launch.protocol import EngineOptions
from shardwright.pipeline import Bundle, Pipeline
from shardwright.pipeline.bundle import is_bundle
from shardwright.runtime.driver import Driver, LoadedProgram, Start, checked


class Runner(Driver):
    """Runs a pipeline on persistent workers; a context manager, called like the original model.

    pipeline
        A `Pipeline` or the path of its file; or a `Bundle` or its folder.
    in_process
        Run all devices in this process and thread instead of one process per device, even if they
        are on several hosts. Under torchrun (RANK and WORLD_SIZE in the environment) this process
        runs the device of its rank.
    timeout
        Seconds within which a running call must make progress: the longest that one task may take.
    threads
        Number of threads of each worker.
    trace
        Whether to record events for `timeline`.
    modules
        Names of modules to import first, here and in each worker: those that register the operators
        which the pipeline ``requires``.
    in_flight
        Number of calls that may run at once; twice the number of devices by default.
    npu_as_cpu
        Whether to run devices of kind ``npu`` on the CPU; they cannot run otherwise.

    Raises PipelineError, WeightError, DeviceError or LaunchError, and leaves no process then.
    """

    def __init__(
        self,
        pipeline: Pipeline | Bundle | str | Path,
        *,
        in_process: bool = False,
        timeout: float = 60.0,
        threads: int = 1,
        trace: bool = False,
        modules: Sequence[str] = (),
        in_flight: int | None = None,
        npu_as_cpu: bool = False,
    ) -> None:
        start = Start(in_process=in_process, modules=modules, npu_as_cpu=npu_as_cpu)
        if not isinstance(pipeline, Pipeline | Bundle) and is_bundle(Path(pipeline)):
            pipeline = Bundle.load(pipeline)
        self._bundle = pipeline if isinstance(pipeline, Bundle) else None
        self._read = checked(pipeline.first if isinstance(pipeline, Bundle) else pipeline, modules)
        prepared = start.arranged(self._read)
        if is_training(prepared):
            raise RunError(
                "the pipeline is of a training step, not of a model; use `shardwright train`, or "
                "TrainingRunner in Python"
            )
        sizes = next(self._bundle.sizes()) if self._bundle is not None else {}
        backend = start(prepared, EngineOptions(threads, trace), timeout)
        super().__init__(prepared, start, backend, in_flight or 2 * len(prepared.devices))
        if self._bundle is not None:
            self._loaded[tuple(sizes.values())] = LoadedProgram(0, self._generator, self._bundle)
            try:
                self._bundle.check_unchanged()  # Workers have read the files meanwhile.
            except WeightError:
                self._close(abort=True)
                raise

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one call and wait for its result. Raises InputError, or RunError and its kinds."""
        return self.submit(*args, **kwargs).result()

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Start a call and return a future of its result.

        Blocks while ``in_flight`` calls are running. Raises InputError if the arguments do not
        match those of the original model.
        """
        whole = self._generator.name(args, kwargs)
        if self._bundle is not None:
            return self._submit_to(self._bundle, whole)
        join: Finish = self._generator.join
        if not self._generator.has_shapes(whole):
            whole, join = self._padded(whole)
        inputs = self._generator.cut_named(whole)
        return self._begin(lambda: self._backend.run_step(inputs, join))

    def _submit_to(self, bundle: Bundle, whole: dict[str, Tensor]) -> Future[Any]:
        """Start a call on the program for its sizes. Raises InputError."""
        shapes = bundle.shapes
        sizes = shapes.of({name: tensor.shape for name, tensor in whole.items()})
        made = bundle.fitting(sizes)

        def read() -> Pipeline:
            return checked(bundle.at(**made), self._start.modules, weights=False)

        number, generator, _ = self._program(
            tuple(made.values()), read, bundle, bundle.check_unchanged
        )
        inputs = generator.cut_named(shapes.pad(whole, made))

        def join(outputs: dict[str, Tensor]) -> Any:
            return generator.fold(shapes.cut(generator.join_named(outputs), sizes, made))

        return self._begin(lambda: self._backend.run_step(inputs, join, program=number))

    def _padded(self, whole: dict[str, Tensor]) -> tuple[dict[str, Tensor], Finish]:
        """A call of fewer rows as one of all, and what cuts its result. Raises InputError."""
        generator, batch = self._generator, short_batch(self._read, whole)
        if batch is None:
            return whole, generator.join
        try:
            rows = self._read.rows_of(batch.inputs)
            if batch.rows < rows.least:
                raise InputError(f"the model does otherwise with fewer than {rows.least}")
        except InputError as error:
            raise InputError(
                f"the call has {batch.rows} rows, the pipeline takes {batch.size}, and cannot "
                f"be padded: {error}; shapes are static, so give {batch.size} rows, or build "
                "a pipeline for this shape"
            ) from None

        def join(outputs: dict[str, Tensor]) -> Any:
            return generator.fold(batch.cut(generator.join_named(outputs), rows.outputs))

        return batch.pad(whole), join

    def map(self, calls: Iterable[Any]) -> Iterator[Any]:
        """The results of many calls, in order, streamed through the devices.

        Each item is a tuple of positional arguments, a dict of keyword arguments, or the single
        argument itself. Items are read up to ``in_flight`` ahead of the results.
        """
        under_way: deque[Future[Any]] = deque()
        for item in calls:
            args, kwargs = _arguments(item)
            under_way.append(self.submit(*args, **kwargs))
            if len(under_way) >= self._in_flight:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()


def run(
    pipeline: Pipeline | Bundle | str | Path,
    *args: Any,
    in_process: bool = False,
    timeout: float = 60.0,
    modules: Sequence[str] = (),
    npu_as_cpu: bool = False,
    **kwargs: Any,
) -> Any:
    """Run a pipeline once, as ``Runner(pipeline)(*args, **kwargs)``, and end its workers.

    If an argument of the model has the name of an option, use `Runner`.
    """
    with Runner(
        pipeline, in_process=in_process, timeout=timeout, modules=modules, npu_as_cpu=npu_as_cpu
    ) as runner:
        return runner(*args, **kwargs)


def _arguments(item: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    if isinstance(item, tuple):
        return item, {}
    if isinstance(item, dict) and not isinstance(item, Tensor):
        return (), item
    return (item,), {}


# --- fewer rows -----------------------------------------------------------------------------------
#
# Rows that pad are copies of the last one, so that indices are valid and nothing is infinite that
# was not; they change no other row, and nobody sees them.


class ShortBatch(NamedTuple):
    """A call with fewer rows: how many, of how many, and which inputs have them, along dim 0."""

    rows: int
    size: int
    inputs: frozenset[str]

    def pad(self, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The call's tensors with copies of the last row up to the size."""
        missing = self.size - self.rows
        return {
            name: torch.cat([tensor, tensor[-1:].expand(missing, *tensor.shape[1:])])
            if name in self.inputs
            else tensor
            for name, tensor in whole.items()
        }

    def cut(self, outputs: Mapping[str, Tensor], dims: Mapping[str, int]) -> dict[str, Tensor]:
        """What the rows given make, of outputs by the original's names, along ``dims``."""
        found = dict(outputs)
        for name, dim in dims.items():
            size = outputs[name].shape[dim] // self.size * self.rows
            found[name] = outputs[name].narrow(dim, 0, size)
        return found


def short_batch(pipeline: Pipeline, whole: Mapping[str, Tensor]) -> ShortBatch | None:
    """What a call with other shapes lacks, where that is as many rows of some inputs."""
    expected = pipeline.metadata.tensors.inputs
    shapes = {name: (tuple(tensor.shape), expected[name].shape) for name, tensor in whole.items()}
    other = {name: pair for name, pair in shapes.items() if pair[0] != pair[1]}
    sizes = {(found[:1], size[:1]) for found, size in other.values() if found[1:] == size[1:]}
    if len(sizes) != 1 or any(found[1:] != size[1:] for found, size in other.values()):
        return None
    ((found, size),) = sizes
    if not found or not size or not 0 < found[0] < size[0]:
        return None
    return ShortBatch(found[0], size[0], frozenset(other))
