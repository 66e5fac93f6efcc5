"""The TrainingRunner: a training pipeline, ready to take steps.

    with sw.TrainingRunner("train.pipeline.json") as session:
        for x, labels in batches:
            loss = session.step(x, labels, lr=1e-3)
        weights = session.state()

It loads the pipeline onto its device slots once and keeps its state there: parameters, buffers and
what the optimizer remembers. A step takes a whole batch, which it cuts in microbatches, and returns
what the program's step does. Whatever is asked, each slot does it in the order in which it was
asked: a step, an evaluation on the same parameters, reading or writing the state.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from torch import Tensor

from shardwright.engine.generator import Generator, InputRows
from shardwright.engine.program import default_lookahead, is_training
from shardwright.errors import RunError
from shardwright.launch.protocol import EngineOptions
from shardwright.pipeline import Pipeline
from shardwright.runtime.contents import READ, WRITE, Contents, Parts
from shardwright.runtime.driver import Driver, LoadedProgram, Start, checked


class TrainingRunner(Driver):
    """Runs steps of a training pipeline on persistent workers; a context manager.

    pipeline
        A `Pipeline` of a training step, or the path of its file.
    in_process
        Run all devices in this process and thread instead of one process per device, even if they
        are on several hosts. Under torchrun (RANK and WORLD_SIZE in the environment) this process
        runs the device of its rank. Every rank then makes the same calls in the same order, and
        results of steps are None except on rank 0.
    timeout
        Seconds within which a running step must make progress: the longest that one task may take.
    threads
        Number of threads of each worker.
    trace
        Whether to record events for `timeline`.
    modules
        Names of modules to import first, here and in each worker: those that register the operators
        which the pipeline ``requires``.
    lookahead
        Number of actions of its schedule that a worker may start early while it waits for others.
        Each may hold the activations of one more microbatch than the schedule says. By default 1,
        or 2 if the devices form one pipeline rank, so that two forwards overlap although a backward
        is scheduled between them.
    in_flight
        Number of steps that may be queued at once.
    npu_as_cpu
        Whether to run devices of kind ``npu`` on the CPU; they cannot run otherwise.

    Raises PipelineError, WeightError, DeviceError or LaunchError, and leaves no process then.
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
        lookahead: int | None = None,
        in_flight: int = 2,
        npu_as_cpu: bool = False,
    ) -> None:
        if (lookahead or 0) < 0 or in_flight < 1:
            raise RunError(
                f"lookahead={lookahead} and in_flight={in_flight}; actions begun early are counted "
                "from 0, steps under way from 1"
            )
        start = Start(in_process=in_process, modules=modules, npu_as_cpu=npu_as_cpu)
        prepared = start.arranged(checked(pipeline, modules))
        if not is_training(prepared):
            raise RunError("the pipeline is of a model, not of a training step; use Runner")
        early = default_lookahead(prepared) if lookahead is None else lookahead
        backend = start(prepared, EngineOptions(threads, trace, early), timeout)
        super().__init__(prepared, start, backend, in_flight)
        self._contents = Contents(prepared)
        self._broken: BaseException | None = None

    # --- steps ------------------------------------------------------------------------------

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step and return the result of the program's step function.

        Takes whole batches, and the learning rate as ``lr``. Other hyper-parameters are those that
        the step was captured with. Raises InputError, RunError.
        """
        return self.submit(*args, **kwargs).result()

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Start a step and return a future of its result.

        Steps run one after another. Blocks while ``in_flight`` steps are queued. Raises InputError
        if the arguments do not match those of the program's step.
        """
        return self._submit(0, self._generator, args, kwargs)

    def submit_to(self, pipeline: Pipeline, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Start a step of another pipeline of the same program, on the same state.

        The pipeline is of the same step, for batches of another shape. Its constants are those of
        this pipeline with the same names and placements. As in `evaluate`, it is loaded once.
        Raises RunError if it changes state that this pipeline does not have, and InputError.
        """
        program = self._load(pipeline, training=True)
        return self._submit(program.number, program.generator, args, kwargs)

    def _submit(
        self, number: int, generator: Generator, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Future[Any]:
        if self._broken is not None:
            raise RunError(
                f"a step has failed and left the state halfway: {self._broken}; load a state first"
            ) from self._broken
        inputs = generator.cut(args, kwargs)
        run, join = self._backend.run_step, generator.join
        future = self._begin(lambda: run(inputs, join, program=number))
        future.add_done_callback(self._note)
        return future

    def _note(self, future: Future[Any]) -> None:
        """Remember a failure that ends no worker: that of an exception in this process."""
        error = future.exception()
        here = error is not None and error.__cause__ is not None
        if error is not None and (here or not isinstance(error, RunError)):
            self._broken = error

    def own_part(self) -> dict[str, InputRows]:
        """Under torchrun, the rows of each batch input that this rank reads, by input.

        A rank may pass inputs of only these rows to `step`, in order. Empty if this process drives
        all devices, and for inputs that are not split.
        """
        return self._generator.own_rows(self._slot) if self._slot is not None else {}

    # --- the same parameters in another pipeline ---------------------------------------------

    def evaluate(self, pipeline: Pipeline | str | Path, *args: Any, **kwargs: Any) -> Any:
        """Run a pipeline of the same model with the current parameters.

        It has the same devices. Constants that this pipeline has under the same names and
        placements are shared; the others are loaded from its own files. A pipeline is loaded once:
        pass the same object, or the same path, again.

        Raises InputError, and RunError naming a constant of which a device holds another slice.
        """
        program = self._load(pipeline, training=False)
        inputs = program.generator.cut(args, kwargs)
        run, join = self._backend.run_step, program.generator.join
        return self._ask(lambda: run(inputs, join, program=program.number)).result()

    def _load(self, pipeline: Pipeline | str | Path, *, training: bool) -> LoadedProgram:
        """The program of a pipeline."""

        def read() -> Pipeline:
            found = checked(pipeline, self._start.modules, weights=False)
            if is_training(found) and not training:
                raise RunError("the pipeline is of a training step; evaluate one of the model")
            return found

        key = id(pipeline) if isinstance(pipeline, Pipeline) else str(pipeline)
        return self._program(key, read, pipeline)

    # --- state ------------------------------------------------------------------------------

    def state(self, names: Collection[str] | None = None) -> dict[str, Tensor]:
        """Global tensors by the program's names: parameters, buffers and optimizer state.

        Optimizer state is named ``optimizer.<parameter>.<key>``. ``names`` selects some of them.
        Raises WeightError for an unknown name.
        """
        replies = self._request(READ, self._contents.wanted(names))
        return self._contents.join({slot: dict(r.tensors) for slot, r in replies.items()})

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Set global tensors by name, as returned by `state`; others keep their values.

        Raises WeightError for an unknown name, another shape or another dtype.
        """
        self._request(WRITE, None, self._contents.cut(state))
        self._broken = None

    def slices(self) -> Parts:
        """The slice of its global tensor that each constant holds, by device and tensor."""
        return self._contents.parts


Session = TrainingRunner
"""The name of `TrainingRunner` in earlier versions."""
