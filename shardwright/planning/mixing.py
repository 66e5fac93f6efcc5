"""Which operators mix the batch, so that cutting it changes what they compute.

The statistics of a batch norm, a contrastive loss, the balance of a mixture's experts are made from
all rows of a batch. Cut in microbatches, each microbatch has its own; that is no error (it is what
one device does with those microbatches, and what GPipe does), but it is to be known.

The batch's dimension is followed from the inputs by dimension annotations. An operator mixes where
it reads that dimension whole, or reads a sum over it in which it is not linear. Means of losses
do not count, as they become quotients of sums over the whole batch (`counts`). Where a microbatch
is one row annotations know nothing of its dimension, and batch norm is known by its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shardwright.ir import IRGraph, IRNode
from shardwright.planning.batch import batch_rows, follow_batch
from shardwright.planning.counts import is_mean_loss
from shardwright.planning.follow import Sharded, SplitPropagation
from shardwright.planning.shard_norms import has_shards, normalizes_batch

FEW = 8
"""How many operators a note lists."""


def mixing_notes(forward: IRGraph, microbatches: int, shards: int) -> list[str]:
    """Notes that name the operators that mix the batch, where it is cut."""
    if shards * microbatches == 1:
        return []
    return notes_on(mixing_nodes(forward), forward, microbatches, shards)


def mixing_nodes(forward: IRGraph) -> list[IRNode]:
    """The operators that mix the batch."""
    walk, alone = _MixingWalk(follow_batch(forward, 1)), batch_rows(forward) == 1
    return [n for n in forward.nodes if walk.mixes(n) or (alone and normalizes_batch(n))]


def notes_on(
    mixing: Sequence[IRNode], forward: IRGraph, microbatches: int, shards: int
) -> list[str]:
    """Notes that name the operators that mix the batch of a forward, as it is cut."""
    notes = []
    if microbatches > 1 and mixing:
        notes.append(f"mix the rows of a batch, so have each microbatch's alone: {_listed(mixing)}")
    norms = [node for node in mixing if has_shards(forward, node, batch_rows(forward), shards)]
    if norms:
        notes.append(
            "have the statistics of each data shard's rows, and the mean of the shards' running "
            f"statistics: {_listed(norms)}"
        )
    return notes


def _listed(nodes: Sequence[IRNode]) -> str:
    """The nodes' operators and modules, the first few of them."""
    names = [f"{_name(node)}{f' in {node.scope}' if node.scope else ''}" for node in nodes]
    distinct = list(dict.fromkeys(names))
    return ", ".join([*distinct[:FEW], *(["…"] if len(distinct) > FEW else [])])


def _name(node: IRNode) -> str:
    return node.op.split(".")[1].removeprefix("_native_").removesuffix("_legit_functional")


@dataclass(slots=True)
class _MixingWalk:
    """Goes through the nodes of a graph that was split by batch, in their order."""

    following: SplitPropagation
    sums: set[int] = field(default_factory=set)
    """Values that are sums over the batch, or linear in such."""

    def mixes(self, node: IRNode) -> bool:
        """Whether a node makes of several rows what is no sum over them."""
        following = self.following
        if is_mean_loss(node):
            self.sums.update(node.outputs)
            return False
        bound, chosen = following.bound(node), following.chosen.get(node.id)
        sums = {i for i, value_id in enumerate(node.inputs) if value_id in self.sums}
        if sums:
            linear = bound is not None and any(sums <= {*inputs} for inputs in bound.linear)
            self.sums.update(node.outputs if linear else ())
            return not linear
        if bound is not None and chosen is not None:
            carries = zip(node.outputs, bound.flow(chosen[0]).outputs, strict=True)
            self.sums.update(value_id for value_id, carry in carries if carry.kind == "partial")
            return False
        rows = (isinstance(following.state(value_id), Sharded) for value_id in node.inputs)
        return bound is not None and any(rows)
