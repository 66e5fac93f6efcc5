"""Why a plan was chosen: from what the search found to an `Explanation`."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.dimops.bound import Flow
from shardwright.planning.automatic.candidates import Found
from shardwright.planning.automatic.search import Search
from shardwright.planning.batch import batch_rows
from shardwright.planning.explanation import Alternative, Explanation, SplitReason
from shardwright.planning.plan import Split, Terms
from shardwright.planning.prediction.spread import Spread

_AGAIN = {
    "none": "",
    "auto": ", some activations computed again",
    "full": ", all activations computed again",
}


def explain(search: Search, found: Sequence[Found]) -> Explanation:
    """What was chosen, the first, against the others."""
    best, *others = found
    return Explanation(
        plan=describe(best),
        rows=batch_rows(search.spreads.graph),
        others=tuple(
            Alternative(describe(other), other.seconds, other.peak, _why(best, other))
            for other in others
        ),
        refused=tuple(f"{shape}: {reason}" for shape, reason in search.refused.items()),
        splits=_splits(best.spread),
        whole=_whole(best.spread),
    )


def describe(found: Found) -> str:
    """A plan in a line."""
    return f"{found.candidate}{_AGAIN[found.options.recompute]}"


def _why(best: Found, other: Found) -> str:
    """What another plan takes longer for, on its slowest slot and for a captured batch."""
    if other.options.recompute != "none" and best.options.recompute == "none":
        return "it must compute activations again to fit"
    work, waits = (_slowest(other)[i] - _slowest(best)[i] for i in range(2))
    if max(work, waits) <= 0:
        return "as fast"
    if work >= waits:
        return (
            f"its slowest slot is at work {1e3 * work:.3f} ms longer, communication inside the "
            "mesh and what is done once a step included"
        )
    return f"its slots wait {1e3 * waits:.3f} ms longer for one another"


def _slowest(found: Found) -> tuple[float, float]:
    """Work and waiting of the slot with the most work, for a captured batch."""
    work = max(found.estimate.busy) / found.estimate.microbatches
    return work, found.seconds - work


def _splits(spread: Spread) -> tuple[SplitReason, ...]:
    """Equal nodes that are split alike, in the order of the first of each."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    if not spread.axes:
        return ()
    for i, node in enumerate(spread.source.view.nodes):
        said = spread.reasons[i] if i < len(spread.reasons) else ""
        key = node.op, _text(spread, i), said or _reason(spread, i)
        groups.setdefault(key, []).append(i)
    return tuple(
        SplitReason(len(at), op, spread.source.view.nodes[at[0]].scope, split, reason)
        for (op, split, reason), at in groups.items()
    )


def _text(spread: Spread, position: int) -> str:
    """What each axis does with a node: ``data: b, tensor: n by 64``."""
    words = []
    for axis, split in zip(spread.axes, spread.splits[position], strict=True):
        if isinstance(split, Split):
            unit = f" by {split.unit}" if split.unit > 1 else ""
            words.append(f"{axis}: {split.identifier}{unit}")
        else:
            words.append(f"{axis}: {'terms of a sum' if isinstance(split, Terms) else 'whole'}")
    return ", ".join(words)


def _reason(spread: Spread, position: int) -> str:
    """Why a node is split so by policies that follow one rule for each axis."""
    bound = spread.source.bound(position)
    if bound is None:
        return "no annotation"
    reasons = []
    for axis, split in zip(spread.axes, spread.splits[position], strict=True):
        if axis == "data":
            reasons.append("it has the batch" if split else "it has no batch")
        elif isinstance(split, Split):
            reasons.append(_of_tensors(spread, position, bound.flow(split.identifier)))
        elif isinstance(split, Terms):
            reasons.append("it is linear: the sum is done behind it")
        else:
            reasons.append("nothing that it reads comes split, and it has no matrix to split")
    return "; ".join(dict.fromkeys(reasons))


def _of_tensors(spread: Spread, position: int, flow: Flow) -> str:
    """Why an inner axis splits a node."""
    values = spread.source.view.values
    inputs = spread.source.view.nodes[position].inputs
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


def _whole(spread: Spread) -> tuple[str, ...]:
    """Operators that every slot of a stage does in full, for want of an annotation."""
    if not spread.axes:
        return ()
    nodes = enumerate(spread.source.view.nodes)
    return tuple(sorted({node.op for i, node in nodes if spread.source.bound(i) is None}))
