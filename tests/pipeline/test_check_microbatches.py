"""One wrong thing at a time: how the batch is cut, and what lasts from microbatch to microbatch."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardwright.pipeline import Document, MetadataTensorSlice, check
from tests.pipeline.documents import Broken, cases, prove_broken, put
from tests.pipeline.training import training_step


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


def row(
    what: str,
    rule: str,
    change: Callable[[Document], object],
    task: str | None = None,
    tensor: str | None = None,
) -> Broken:
    return Broken(what, rule, change, task, tensor, base=training_step)


CASES = cases(
    row("an unknown tensor", "microbatches", dim(q=0), tensor="q"),
    row("beyond the dimensions", "microbatches", dim(x=2), tensor="x"),
    row("uneven", "microbatches", microbatches(3), tensor="x"),
    row("of a scalar", "microbatches", dim(lr=0), tensor="lr"),
    row("the second one's rows", "microbatches", second_microbatch("inputs", "x"), tensor="x"),
    row("both readers", "microbatches", lr_in_the_forward, "d1.U.0", "lr@d1"),
    row("an output that is not cut", "microbatches", uncut("prediction"), "d1.F1.0", "y"),
    row("read elsewhere", "replaces", gradient_instead, tensor="g2'"),
    row("replaced by the preparation", "replaces", prepared, tensor="count"),
)


@pytest.mark.parametrize("case", CASES)
def test_broken(case: Broken) -> None:
    prove_broken(case)


def test_labels_that_only_the_preparation_reads_are_whole() -> None:
    document = training_step()
    piece = document.metadata.tensor_slices.inputs["labels"]
    assert piece.placements == ((0, 4), (0, 2))
    check(document)
