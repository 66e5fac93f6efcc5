"""Why a plan is as it is, as a value that is saved with the plan and prints as text.

`explain` makes it. What always holds: plans with other numbers of microbatches make other steps, so
all are compared by what one batch of the captured size takes.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from shardwright.planning.predicted import ITEMS, Prediction


class Alternative(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A plan that was looked at: seconds for a captured batch, the most bytes of a slot, and why
    it is not chosen."""

    plan: str
    seconds: float
    memory: int
    why: str

    def __str__(self) -> str:
        return f"{self.plan}: {1e3 * self.seconds:.3f} ms, {self.memory / 1e6:.2f} MB: {self.why}"


class SplitReason(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Equal nodes that are split alike: how many, the first's place, how, and why."""

    count: int
    operator: str
    scope: str
    split: str
    reason: str

    def __str__(self) -> str:
        where = f" in {self.scope}" if self.scope else ""
        return f"{self.count} × {self.operator}{where}: {self.split}: {self.reason}"


class Explanation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was chosen, and against what.

    rows
        Of the captured batch; 0 where it has none.
    simulated
        Seconds of the built plan for a captured batch; 0 where others are not close to it.
    refused
        Meshes that cannot be, with the reason.
    whole
        Operators that every slot of a stage does in full for want of an annotation.
    """

    plan: str
    rows: int
    others: tuple[Alternative, ...] = ()
    refused: tuple[str, ...] = ()
    splits: tuple[SplitReason, ...] = ()
    whole: tuple[str, ...] = ()
    simulated: float = 0.0

    def text(self, prediction: Prediction) -> str:
        """All of it, with what the plan is predicted to take."""
        return "\n".join(self._lines(prediction))

    def items(self) -> Iterator[str]:
        """What is said beside the prediction, a text each."""
        yield f"chosen: {self.plan}, {self.rows} rows a captured batch"
        yield from (f"other: {other}" for other in self.others)
        yield from (f"not possible: {reason}" for reason in self.refused)
        yield from (f"split: {split}" for split in self.splits)
        yield from (f"whole for want of an annotation: {operator}" for operator in self.whole)

    def _lines(self, prediction: Prediction) -> Iterator[str]:
        yield f"chosen: {self.plan}"
        yield f"  {prediction.summary()}"
        yield f"  {_batch(prediction.per_microbatch, self.rows)}; plans are compared by this"
        if self.simulated:
            yield f"  built and simulated it takes {1e3 * self.simulated:.3f} ms a captured batch"
        yield "others:"
        for other in self.others:
            seconds = _compared(other.seconds, prediction.per_microbatch)
            yield (f"  {other.plan}: {seconds}, {other.memory / 1e6:.2f} MB: {other.why}")
        if not self.others:
            yield "  none is possible"
        yield from (f"  not possible: {reason}" for reason in self.refused)
        yield "splits:"
        for found in self.splits:
            yield f"  {found}"
        if not self.splits:
            yield "  a stage is one slot, which does its nodes whole"
        if self.whole:
            yield f"whole for want of an annotation: {', '.join(self.whole)}"
        yield "memory of the slots, in MB:"
        yield from _memory(prediction)


def _batch(seconds: float, rows: int) -> str:
    """What a captured batch takes, and a row of it."""
    text = f"{1e3 * seconds:.3f} ms a captured batch"
    return f"{text} of {rows} rows, {1e3 * seconds / rows:.3f} ms a row" if rows else text


def _compared(seconds: float, best: float) -> str:
    """What a captured batch takes, and how much more that is; nothing has no share of nothing."""
    text = f"{1e3 * seconds:.3f} ms a captured batch"
    return f"{text} ({100 * (seconds / best - 1):+.1f}%)" if best else text


def _memory(prediction: Prediction) -> Iterator[str]:
    """A line for neighbours that hold the same."""
    names = ("total", *ITEMS)
    alike: dict[tuple[int, ...], list[str]] = {}
    for slot in prediction.slots:
        held = tuple(getattr(slot.memory, name) for name in names)
        alike.setdefault(held, []).append(slot.device)
    for held, devices in alike.items():
        items = (f"{name} {size / 1e6:.2f}" for name, size in zip(names, held, strict=True))
        shown = devices if len(devices) <= 4 else [devices[0], "…", devices[-1]]
        yield f"  {' '.join(shown)}: {', '.join(items)}"
