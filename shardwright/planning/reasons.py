"""Why a plan by search is as it is: what it was compared with, and why nodes are split so."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from shardwright.costs.placed import Forward
from shardwright.ops.bound import Flow
from shardwright.planning.candidates import Candidate
from shardwright.planning.plan import Alternative, Assignment, SplitReason
from shardwright.sharding.strategy import Choice, Split, Terms


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
        key = source.view.nodes[i].op, _text(found), said or _reason(source, i, found)
        groups.setdefault(key, []).append(i)
    return tuple(
        SplitReason(len(at), op, source.view.nodes[at[0]].scope, split, reason)
        for (op, split, reason), at in groups.items()
    )


def _shared(assigned: Sequence[Assignment]) -> Iterator[tuple[int, Assignment]]:
    """The nodes that several slots share, by position."""
    return ((i, found) for i, found in enumerate(assigned) if found.mesh.devices[1:])


def _axes(found: Assignment) -> Iterator[tuple[str, Choice]]:
    return zip(found.mesh.axes, found.splits, strict=True)


def _text(found: Assignment) -> str:
    """What each axis does with a node: ``data: b, tensor: n by 64``."""
    words = []
    for axis, split in _axes(found):
        if isinstance(split, Split):
            unit = f" by {split.unit}" if split.unit > 1 else ""
            words.append(f"{axis}: {split.identifier}{unit}")
        else:
            words.append(f"{axis}: {'terms of a sum' if isinstance(split, Terms) else 'whole'}")
    return ", ".join(words)


def _reason(source: Forward, position: int, found: Assignment) -> str:
    """Why a node is split so by policies that follow one rule for each axis."""
    bound = source.outline.bound(position)
    if bound is None:
        return "no annotation"
    reasons = []
    for axis, split in _axes(found):
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
