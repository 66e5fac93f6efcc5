"""Further programs over the state of a trained step: other shapes of batches, an evaluation.

Each runs on the devices of the step, split as the step is, on its parameters and states, which are
not copied. There is one for each shape of batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from shardwright.building import build
from shardwright.compiler import lower
from shardwright.devices import DeviceKind
from shardwright.errors import CaptureError, GraphError, InputError, PlanError
from shardwright.ir import IRGraph
from shardwright.pipeline import Pipeline
from shardwright.planning import Plan, plan_beside
from shardwright.runtime.training_runner import TrainingRunner
from shardwright.tracing import capture_step, compile_ir
from shardwright.tracing.closures import Closure, find_closure, unchanged
from shardwright.tracing.program_set import share_names
from shardwright.training.data import Batch, Data, Loading
from shardwright.training.logs import means
from shardwright.training.program import TrainingProgram, batch_size, first_microbatch, say_batched

MORE_MICROBATCHES = 4
"""A batch comes in up to so many times the microbatches of the first one: a choice. Each costs a
round through the pipeline, however few rows it has."""
MANY_MICROBATCHES = 64
"""Or in so many, where that takes no more memory than the first batch does."""


class Bucket(NamedTuple):
    """A step for batches of one shape: its pipeline, and in how many microbatches they come."""

    pipeline: Pipeline
    microbatches: int


@dataclass(frozen=True, slots=True)
class ProgramBuilder:
    """Builds the pipeline of a step, and of other graphs over the same state."""

    graph: IRGraph
    plan: Plan
    device_kind: DeviceKind
    lower: bool

    def build(self) -> Pipeline:
        """The pipeline of the step itself."""
        return self._built(self.graph, self.plan)

    def build_beside(self, graph: IRGraph, microbatches: int = 1) -> Pipeline:
        """The pipeline of another graph, on the layouts of the step's state. Raises PlanError."""
        graph = share_names(graph, self.graph)
        return self._built(graph, plan_beside(graph, self.graph, self.plan, microbatches))

    def _built(self, graph: IRGraph, plan: Plan) -> Pipeline:
        pipeline = build(graph, plan, device_kind=self.device_kind)
        return lower(pipeline) if self.lower else pipeline


class StepBuckets:
    """The programs of a step, one for each shape of its batches.

    A step on a batch of r rows computes what the step does on one device with these rows. They
    come in equal microbatches: as many as the first batch has, or else as few as have no more rows
    than its own; where no such number divides r, or a mesh axis cannot split so few rows, in fewer,
    larger ones.
    """

    def __init__(
        self,
        step_fn: Callable[..., Any],
        program: TrainingProgram,
        builder: ProgramBuilder,
        *,
        seed: int,
        note: Callable[[str], None],
    ) -> None:
        assert builder.plan.training is not None, "a step has a plan for training"
        self._step_fn = step_fn
        self._program = program
        self._builder = builder
        self._seed = seed
        self._note = note
        self.first = Bucket(builder.build(), builder.plan.training.microbatches)
        self._known = {program.batch.shapes: self.first}

    @property
    def count(self) -> int:
        """How many shapes there are programs for."""
        return len(self._known)

    def has(self, batch: Batch) -> bool:
        """Whether there is a program for a batch already."""
        return batch.shapes in self._known

    def prepare(self, batches: Iterable[Batch]) -> None:
        """Make the programs for batches that will come. Raises InputError."""
        for batch in batches:
            self.of(batch)

    def of(self, batch: Batch) -> Bucket:
        """The program for a batch, made where it is the first of its shape. Raises InputError."""
        if batch.shapes not in self._known:
            self._note(f"{described_batch(batch, self._program.batch)}; a program is made for it")
            self._known[batch.shapes] = self._make(batch)
        return self._known[batch.shapes]

    def _make(self, batch: Batch) -> Bucket:
        refusal: Exception | None = None
        for microbatches in self._counts(batch):
            try:
                made = self._with(batch, microbatches)
                self._note_large(batch_size(batch.tensors), microbatches)
                return made
            except (CaptureError, PlanError, GraphError) as error:
                refusal = refusal or error
        raise InputError(
            f"{described_batch(batch, self._program.batch)}, and the step cannot be planned for "
            f"it on this mesh: {refusal}; choose a batch size that leaves no such remainder, pad "
            "the batch, or leave it out with drop_last=True"
        ) from refusal

    @property
    def _rows(self) -> int:
        """How many rows a microbatch of the first batch has."""
        return batch_size(self._program.batch.tensors) // self.first.microbatches

    def _counts(self, batch: Batch) -> Iterator[int]:
        """In how many microbatches a batch may come, best first."""
        size = batch_size(batch.tensors)
        if self._is_ambiguous(batch, size):
            yield 1
            return
        found = [n for n in range(1, size + 1) if size % n == 0]
        small = [n for n in found if size // n <= self._rows]
        few = max(MORE_MICROBATCHES * self.first.microbatches, MANY_MICROBATCHES)
        yield from sorted(
            (n for n in small if n <= few), key=lambda n: (n != self.first.microbatches, n)
        )
        yield from reversed([n for n in found if size // n > self._rows])
        yield from [n for n in small if n > few]

    def _note_large(self, size: int, microbatches: int) -> None:
        """Say where microbatches have more rows than the first batch's, which takes memory."""
        rows = size // microbatches
        if rows > self._rows:
            self._note(
                f"batches of {size} rows come in {microbatches} of {rows}, where others have "
                f"{self._rows}: activations take about {rows / self._rows:.2g} times the memory. "
                "Choose a batch size whose remainder divides, or drop_last=True"
            )

    def _is_ambiguous(self, batch: Batch, size: int) -> bool:
        """Whether a tensor that has no rows of the batch is by chance as long as it."""
        pairs = zip(batch.tensors, self._program.batch.tensors, strict=False)
        return any(one.shape == other.shape and one.shape[:1] == (size,) for one, other in pairs)

    def _with(self, batch: Batch, microbatches: int) -> Bucket:
        """The program for a batch that comes in so many microbatches. Raises PlanError."""
        call = first_microbatch(self._step_fn, batch, microbatches)
        captured = capture_step(self._step_fn, call.args, call.kwargs, seed=self._seed).graph
        say_batched(captured, self._step_fn, batch)
        self._check_inputs(captured)
        return Bucket(self._builder.build_beside(captured, microbatches), microbatches)

    def _check_inputs(self, graph: IRGraph) -> None:
        """Raise CaptureError where a step takes other inputs for a batch of another shape."""
        found, expected = _input_names(graph), _input_names(self._program.graph)
        if found != expected:
            raise CaptureError(
                f"with a batch of this shape the step takes {', '.join(found)}, with the first one "
                f"{', '.join(expected)}"
            )


def _input_names(graph: IRGraph) -> list[str]:
    return [graph.values[value_id].name for value_id in graph.inputs]


def described_batch(batch: Batch, first: Batch) -> str:
    """Which batch it is, and its shapes beside those of the first."""
    return (
        f"batch {batch.number} of pass {batch.epoch} has the shapes {shape_text(batch)}, the "
        f"first one {shape_text(first)}"
    )


def shape_text(batch: Batch) -> str:
    """The shapes of a batch's tensors."""
    return ", ".join(str(list(shape)) for shape in batch.shapes)


# --- evaluation -----------------------------------------------------------------------------------


class Evaluation:
    """An evaluation function, and a pipeline of it for each shape of its batches."""

    def __init__(
        self,
        evaluate: Callable[..., Any],
        data: Data,
        builder: ProgramBuilder,
        *,
        seed: int,
    ) -> None:
        self._evaluate = evaluate
        self._name = getattr(evaluate, "__name__", "evaluation")
        self._loading = Loading(data, seed=seed, epochs=1)
        self._builder = builder
        self._pipelines: dict[object, Pipeline] = {}

    def prepare(self) -> None:
        """Make the pipelines of all shapes that the data tells of.

        Raises CaptureError, PlanError and InputError, before anything is trained.
        """
        first = self._loading.first()
        for batch in (first, *self._loading.other_shapes(first, None)):
            self._pipeline(batch)

    def run(self, session: TrainingRunner, *, is_rank_zero: bool) -> dict[str, float]:
        """The means over all batches, on rank zero; nothing elsewhere.

        Raises InputError where the function returns no tensor.
        """
        totals: dict[str, float] = {}
        samples = 0
        for batch in self._loading.batches():
            found = session.evaluate(self._pipeline(batch), *batch.args, **batch.kwargs)
            for name, number in (means(found, self._name) if is_rank_zero else {}).items():
                totals[name] = totals.get(name, 0.0) + number * batch.size
            samples += batch.size
        return {name: total / samples for name, total in totals.items()}

    def _pipeline(self, batch: Batch) -> Pipeline:
        key = batch.shapes
        if key not in self._pipelines:
            graph = capture_evaluation(self._evaluate, batch)
            self._pipelines[key] = self._builder.build_beside(graph)
        return self._pipelines[key]


def capture_evaluation(evaluate: Callable[..., Any], batch: Batch) -> IRGraph:
    """The graph of an evaluation function, with the modules that it uses in eval mode."""
    closure = find_closure(evaluate)
    with unchanged(closure), torch.no_grad(), _eval_mode(closure):
        return compile_ir(evaluate, *batch.args, name="evaluation", **batch.kwargs)


@contextmanager
def _eval_mode(closure: Closure) -> Iterator[None]:
    modules = [part for module in closure.modules.values() for part in module.modules()]
    modes = [module.training for module in modules]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module, training in zip(modules, modes, strict=True):
            module.training = training
