"""One wrong thing at a time in training steps: phases, stages, what is read, microbatches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shardwright.pipeline import Document, MetadataTensorSlice, Microbatches, ScheduleInfo, check
from tests.pipeline.documents import Broken, cases, constant, prove_broken, put, task
from tests.pipeline.training import training_step


def training(**fields: Any) -> Callable[[Document], None]:
    """A change of ``training``."""
    return lambda document: put(**fields)(document.training)


def schedule(
    ranks: int = 2,
    chunks: int = 1,
    placement: tuple[int, ...] = (0, 1),
    slots: tuple[tuple[str, ...], ...] = (("d0",), ("d1",)),
) -> Callable[[Document], None]:
    return training(schedule=ScheduleInfo("1f1b", ranks, chunks, placement, slots))


def reads(name: str, tensor: str, instead: str) -> Callable[[Document], None]:
    """A supertask reads another tensor, of the same shape."""

    def change(document: Document) -> None:
        found = document.supertasks[name]
        found.inputs = tuple(tensor if read == instead else read for read in found.inputs)

    return change


def forget(tensor: str) -> Callable[[Document], object]:
    return lambda document: document.training.replaces.pop(tensor)  # type: ignore[union-attr]


def begin_with_contents(document: Document) -> None:
    """The first gradient is stored instead of zeros."""
    document.tensors["g1"].init = None
    document.tensors["g1"].value = constant("g1", 8, 8).value


def row(
    what: str,
    rule: str,
    change: Callable[[Document], object],
    task: str | None = None,
    tensor: str | None = None,
) -> Broken:
    return Broken(what, rule, change, task, tensor, base=training_step)


PHASES = cases(
    row("no schedule", "phases", training(schedule=None)),
    row("no microbatches", "phases", training(microbatches=None)),
    row("a task without", "phases", task("d0.F0.0", phase=None, stage=None), "d0.F0.0"),
    row("a message without", "phases", task("g0.send", phase=None, stage=None), "g0.send"),
    Broken("outside a step", "phases", task("d0.0", phase="forward", stage=0), "d0.0"),
    row("none in the forward", "stages", task("d0.F0.0", stage=None), "d0.F0.0"),
    row("one in the update", "stages", task("d0.U.0", stage=0), "d0.U.0"),
    row("one in the preparation", "stages", task("d1.P.0", stage=1), "d1.P.0"),
    Broken("one outside a step", "stages", task("d0.0", stage=0), "d0.0"),
    row("another rank's", "stages", task("d0.F0.0", stage=1), "d0.F0.0"),
    row("beyond the last", "stages", task("d1.F1.0", stage=2), "d1.F1.0"),
    row("slots of one rank", "schedule", schedule(slots=(("d0", "d1"),))),
    row("a stage too many", "schedule", schedule(placement=(0, 1, 0))),
    row("two stages on one rank", "schedule", schedule(placement=(0, 0))),
    row("a device on two ranks", "schedule", schedule(slots=(("d0", "d1"), ("d1",)))),
    row("a device on no rank", "schedule", schedule(slots=(("d0",), ()))),
    row("an unknown device", "schedule", schedule(slots=(("d0",), ("d1", "d2")))),
    row(
        "backward before forward",
        "phase-order",
        task("d1.F1.0", phase="backward_weight"),
        "d1.B1.0",
        "y",
    ),
    row(
        "weights before gradients",
        "phase-order",
        task("d1.B1.0", phase="backward_weight"),
        "g1.send",
        "dh@d1",
    ),
    row(
        "preparation after the forward",
        "phase-order",
        reads("d1.P.0", "y", "labels"),
        "d1.P.0",
        "y",
    ),
    row("no sum", "once-a-step", forget("g1'"), "d0.U.0", "g1'"),
    row("a sum that begins anywhere", "once-a-step", begin_with_contents, "d0.U.0", "g1'"),
)


def test_a_training_step_passes() -> None:
    check(training_step())


def test_one_microbatch_needs_no_sums() -> None:
    document = training_step()
    training(microbatches=Microbatches(1, {"x": 0, "prediction": 0}))(document)
    document.metadata.tensors.inputs["x"].shape = (2, 8)
    document.metadata.tensors.outputs["prediction"].shape = (2, 2)
    forget("g1'")(document)
    check(document)


def dim(**dims: int) -> Callable[[Document], object]:
    """A change of the dimensions that are cut."""
    return lambda document: document.training.microbatches.dim.update(dims)  # type: ignore[union-attr]


def uncut(name: str) -> Callable[[Document], object]:
    return lambda document: document.training.microbatches.dim.pop(name)  # type: ignore[union-attr]


def microbatches(n: int) -> Callable[[Document], None]:
    return lambda document: put(n=n)(document.training.microbatches)  # type: ignore[union-attr]


def second_microbatch(side: str, name: str) -> Callable[[Document], None]:
    """A slice of the rows 2 and 3."""

    def change(document: Document) -> None:
        found: MetadataTensorSlice = getattr(document.metadata.tensor_slices, side)[name]
        found.placements = ((2, 4), *found.placements[1:])

    return change


def lr_in_the_forward(document: Document) -> None:
    found = document.supertasks["d1.F1.0"]
    found.inputs = (*found.inputs[:3], "lr@d1")


def gradient_instead(document: Document) -> None:
    """The weights of stage 1 read what the update replaces once a microbatch."""
    found = document.supertasks["d1.U.0"]
    found.inputs = ("g2", *found.inputs[1:])


def prepared(document: Document) -> None:
    """The count replaces the loss, and is what comes out as such."""
    document.supertasks["d1.U.1"].inputs = ("count",)
    replaces = document.training.replaces  # type: ignore[union-attr]
    del replaces["loss'"]
    replaces["count"] = "loss"


def cut_row(
    what: str,
    rule: str,
    change: Callable[[Document], object],
    task: str | None = None,
    tensor: str | None = None,
) -> Broken:
    return Broken(what, rule, change, task, tensor, base=training_step)


MICROBATCHES = cases(
    cut_row("an unknown tensor", "microbatches", dim(q=0), tensor="q"),
    cut_row("beyond the dimensions", "microbatches", dim(x=2), tensor="x"),
    cut_row("uneven", "microbatches", microbatches(3), tensor="x"),
    cut_row("of a scalar", "microbatches", dim(lr=0), tensor="lr"),
    cut_row("the second one's rows", "microbatches", second_microbatch("inputs", "x"), tensor="x"),
    cut_row("both readers", "microbatches", lr_in_the_forward, "d1.U.0", "lr@d1"),
    cut_row("an output that is not cut", "microbatches", uncut("prediction"), "d1.F1.0", "y"),
    cut_row("read elsewhere", "replaces", gradient_instead, tensor="g2'"),
    cut_row("replaced by the preparation", "replaces", prepared, tensor="count"),
)


def test_labels_that_only_the_preparation_reads_are_whole() -> None:
    document = training_step()
    piece = document.metadata.tensor_slices.inputs["labels"]
    assert piece.placements == ((0, 4), (0, 2))
    check(document)


@pytest.mark.parametrize("case", [*PHASES, *MICROBATCHES])
def test_broken(case: Broken) -> None:
    prove_broken(case)
