"""Candidates of the search for a plan: what they are compared by, and why none of them fits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardwright.costs.placed import Forward, Integers, PlacedCosts
from shardwright.costs.predict import Estimate
from shardwright.ir.tensor_meta import count_text
from shardwright.ops.bound import Flow
from shardwright.planning.options import StepOptions
from shardwright.planning.plan import Alternative, Assignment, SplitReason, split_text
from shardwright.planning.shapes import Shape
from shardwright.sharding.strategy import Split, Terms

STAGES = 128
"""More virtual stages are not tried."""
_AGAIN = {
    "none": "",
    "auto": ", some activations computed again",
    "full": ", all activations computed again",
}


class Setting(NamedTuple):
    """A shape with a schedule: all of a plan but where it is cut and what is done again."""

    shape: Shape
    schedule: str
    chunks: int
    zero: int

    @property
    def stages(self) -> int:
        """How many virtual stages."""
        return self.shape.pipeline * self.chunks


@dataclass(frozen=True)
class Candidate:
    """A plan that was looked at.

    options
        Those of a training step; of a model they say only how many stages a rank has.
    stages
        The stage of each node.
    memory
        Bytes of a slot.
    partitioner
        Which one made the stages; none where they are the search's own cut.
    simulated
        Seconds of the built plan for each batch of the captured size; 0 where it was not simulated,
        infinite where it cannot be built.
    """

    shape: Shape
    options: StepOptions
    placed: PlacedCosts
    stages: Integers
    estimate: Estimate
    memory: int
    partitioner: str = ""
    simulated: float = 0.0

    def __str__(self) -> str:
        options = self.options
        chunks = options.chunks or 1
        each = f" of {chunks} stages a rank" if chunks > 1 else ""
        schedule = f", {options.schedule}{each}" if self.shape.pipeline > 1 else ""
        zero = ", optimizer state sharded" if options.zero else ""
        count = count_text(options.microbatches, "microbatch")
        by = f", stages by {self.partitioner}" if self.partitioner else ""
        return f"{self.shape}{schedule}, {count}{zero}{_AGAIN[options.recompute]}{by}"

    @property
    def seconds(self) -> float:
        """For each batch of the captured size."""
        return self.estimate.step_time / self.estimate.microbatches

    @property
    def work(self) -> float:
        """Of the slot with the most work, for a batch of the captured size."""
        return max(self.estimate.busy) / self.estimate.microbatches

    @property
    def peak(self) -> int:
        """Bytes of the fullest slot."""
        return max(held.total for held in self.estimate.memory)

    @property
    def kept(self) -> int:
        """Bytes of activations on the slot that keeps the most."""
        return max(held.activations for held in self.estimate.memory)

    @property
    def too_much(self) -> int:
        """Bytes that a slot would hold, or keep of activations, above what it may; 0 if it fits."""
        over = self.peak - self.memory
        if self.options.memory is not None:
            over = max(over, self.kept - self.options.memory)
        return max(over, 0)

    @property
    def fits(self) -> bool:
        """Whether every slot holds, and keeps of activations, no more than it may."""
        return self.too_much == 0


def too_many_stages(setting: Setting, nodes: int) -> str:
    """Why a graph of so many nodes has no such plan."""
    limit = f"the {nodes} nodes of the graph" if nodes <= STAGES else f"{STAGES}, the most tried"
    return (
        f"{setting.shape.pipeline} pipeline ranks with {setting.chunks} chunks each are "
        f"{setting.stages} virtual stages, more than {limit}; take fewer chunks or slots"
    )


def nearest_text(name: str, nearest: Candidate, slots: int) -> str:
    """Why the nearest plan of a graph on so many slots does not fit, and what would."""
    ranks = nearest.estimate.memory
    if nearest.peak <= nearest.memory:
        fullest = max(range(len(ranks)), key=lambda rank: ranks[rank].activations)
        return (
            f"no plan for {name!r} keeps its activations within memory={nearest.options.memory}: "
            f"the nearest ({nearest}) keeps {nearest.kept} bytes on slot "
            f"{nearest.estimate.slots[fullest][0]!r} even if all that can be is computed again; "
            "give memory= as much, or capture a smaller batch and take more microbatches"
        )
    fullest = max(range(len(ranks)), key=lambda rank: ranks[rank].total)
    held, slot = ranks[fullest], nearest.estimate.slots[fullest][0]
    needed = -(-slots * nearest.peak // nearest.memory)
    return (
        f"no plan for {name!r} fits: the nearest ({nearest}) holds {held} on slot {slot!r}, "
        f"{held.total - nearest.memory} bytes more than its {nearest.memory}; it would fit in "
        f"slots of {nearest.peak} bytes; give those, about {needed} slots instead of {slots}, or "
        "capture a smaller batch and take more microbatches"
    )


# --- why a plan is as it is -----------------------------------------------------------------------


def alternatives(best: Candidate, others: Sequence[Candidate]) -> tuple[Alternative, ...]:
    """What else was looked at, the fastest first, and why it is not chosen."""
    return tuple(
        Alternative(str(other), other.seconds, other.peak, _why(best, other))
        for other in sorted(others, key=lambda other: other.seconds)
    )


def _why(best: Candidate, other: Candidate) -> str:
    """What another plan takes longer for, on its slowest slot."""
    if other.options.recompute != "none" and best.options.recompute == "none":
        return "it must compute activations again to fit"
    if math.isinf(other.simulated):
        return "it cannot be built"
    if best.simulated < other.simulated and other.seconds <= best.seconds:
        return (
            f"built and simulated it takes {1e3 * other.simulated:.3f} ms, the chosen one "
            f"{1e3 * best.simulated:.3f} ms"
        )
    work = other.work - best.work
    waits = (other.seconds - other.work) - (best.seconds - best.work)
    if max(work, waits) <= 0:
        return "as fast"
    if work >= waits:
        return (
            f"its slowest slot is at work {1e3 * work:.3f} ms longer, communication inside the "
            "mesh and what is done once a step included"
        )
    return f"its slots wait {1e3 * waits:.3f} ms longer for one another"


def split_reasons(
    source: Forward, assigned: Sequence[Assignment], reasons: Sequence[str]
) -> tuple[SplitReason, ...]:
    """Equal nodes that are split alike, in the order of the first of each.

    ``reasons`` are those of nodes where they are known.
    """
    groups: dict[tuple[str, str, str], list[int]] = {}
    for i, found in _shared(assigned):
        said = reasons[i] if i < len(reasons) else ""
        key = (
            source.view.nodes[i].op,
            split_text(found.mesh.axes, found.splits),
            said or _reason(source, i, found),
        )
        groups.setdefault(key, []).append(i)
    return tuple(
        SplitReason(len(at), op, source.view.nodes[at[0]].scope, split, reason)
        for (op, split, reason), at in groups.items()
    )


def _shared(assigned: Sequence[Assignment]) -> Iterator[tuple[int, Assignment]]:
    """The nodes that several slots share, by position."""
    return ((i, found) for i, found in enumerate(assigned) if found.mesh.devices[1:])


def _reason(source: Forward, position: int, found: Assignment) -> str:
    """Why a node is split so by policies that follow one rule for each axis."""
    bound = source.outline.bound(position)
    if bound is None:
        return "no annotation"
    reasons = []
    for axis, split in zip(found.mesh.axes, found.splits, strict=True):
        if axis == "data":
            reasons.append("it has the batch" if split else "it has no batch")
        elif isinstance(split, Split):
            reasons.append(_of_tensors(source, position, bound.flow(split.identifier)))
        elif isinstance(split, Terms):
            reasons.append("it is linear: the sum is done behind it")
        else:
            reasons.append("nothing that it reads comes split, and it has no matrix to split")
    return "; ".join(dict.fromkeys(reasons))


def _of_tensors(source: Forward, position: int, flow: Flow) -> str:
    """Why an inner axis splits a node."""
    values = source.view.values
    inputs = source.view.nodes[position].inputs
    cut = [
        values[v].is_stored
        for v, carry in zip(inputs, flow.inputs, strict=True)
        if carry.kind == "shard"
    ]
    if any(carry.kind == "partial" for carry in flow.outputs):
        return "what it sums over comes split: partial sums, put together behind it"
    if cut and all(cut):
        return "columns of its stored matrix, which nothing else has"
    return "what it reads comes split so"


def done_whole(source: Forward, assigned: Sequence[Assignment]) -> tuple[str, ...]:
    """Operators that every slot of a stage does in full, for want of an annotation."""
    nodes = source.view.nodes
    return tuple(
        sorted({nodes[i].op for i, _ in _shared(assigned) if source.outline.bound(i) is None})
    )
