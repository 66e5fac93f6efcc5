"""Programs of a training step for batches of other shapes than the first: a shorter last one.

In comes a batch; out comes a `Bucket`, a pipeline of the same step for batches of its shape. It
runs on the same slots, split the same way, on the state of the first program, which is not copied.

What always holds: a step on a batch of r rows computes what the step does on one device with these
rows. They come in equal microbatches, as many as the first program has or else as few as have no
more rows than its own; where no such number divides r, or a mesh axis cannot split so few rows,
in fewer, larger ones. A batch that no number fits is refused, before training begins where the
data tells its length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from shardwright.building import build
from shardwright.compiler import lower as lowered
from shardwright.errors import CaptureError, GraphError, InputError, PlanError
from shardwright.ir import IRGraph
from shardwright.pipeline import Pipeline
from shardwright.pipeline.schema import DeviceKind
from shardwright.planning import Plan, plan_beside
from shardwright.tracing import capture_step
from shardwright.training.loading import Batch
from shardwright.training.program import TrainingProgram, batch_size, first_microbatch, say_batched
from shardwright.training.shared_names import share_names

MORE_MICROBATCHES = 4
"""A batch comes in up to so many times the microbatches of the first one: a choice. Each costs a
round through the pipeline, however few rows it has."""
MANY_MICROBATCHES = 64
"""Or in so many, where that takes no more memory than the first batch does."""


class Bucket(NamedTuple):
    """A step for batches of one shape: its pipeline, and in how many microbatches they come."""

    pipeline: Pipeline
    microbatches: int


class StepBuckets:
    """The programs of a step, one for each shape of its batches; the first is `train`'s own."""

    def __init__(
        self,
        step_fn: Callable[..., Any],
        program: TrainingProgram,
        plan: Plan,
        pipeline: Pipeline,
        *,
        device_kind: DeviceKind,
        seed: int,
        lower: bool,
        note: Callable[[str], None],
    ) -> None:
        assert plan.training is not None, "a step has a plan for training"
        self._step_fn = step_fn
        self._plan = plan
        self._program = program
        self._device_kind = device_kind
        self._seed = seed
        self._lower = lower
        self._note = note
        self.first = Bucket(pipeline, plan.training.microbatches)
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
        graph = share_names(captured, self._program.graph)
        self._check_inputs(graph)
        plan = plan_beside(graph, self._program.graph, self._plan, microbatches)
        pipeline = build(graph, plan, device_kind=self._device_kind)
        return Bucket(lowered(pipeline) if self._lower else pipeline, microbatches)

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
