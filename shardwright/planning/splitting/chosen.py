"""What splits of a graph's nodes take: seconds of each node on a slot, and what a slot stores.

Comes in: a forward view, what each axis of a mesh does with each node, machines, costs of nodes.
Goes out: a `ChosenSplits`. `best_splits` gives the one that takes the least; `price_splits` says of
any splits, such as those of a policy, what they take.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from shardwright.clusters import Cluster, Mesh
from shardwright.costs.cost import Costs, NodeCost
from shardwright.errors import PlanError
from shardwright.ir import IRGraph
from shardwright.ops.catalog import why_whole
from shardwright.sharding.place import Outline, PlacedGraph, outline_of, place
from shardwright.sharding.strategy import Choices, Part


class ChosenSplits(msgspec.Struct, frozen=True):
    """Splits, and what they take; every list has an entry a node of the view.

    splits
        What each axis of the mesh does with the node, as an `Assignment` has it.
    nodes
        Seconds of a microbatch on a slot, communication included: the forward's with the node that
        reads what is brought, the backward's with the node whose gradients are.
    once
        Seconds once a step: what brings the gradients of stored values together, with the node
        that is the first to read them.
    stored
        Bytes of stored values that a slot holds, at the node that is the first to read them so.
    reasons
        In words, why the node is split so.
    """

    splits: list[Choices]
    nodes: list[NodeCost]
    once: list[float]
    stored: list[float]
    reasons: list[str]

    def seconds(self, microbatches: int = 1) -> float:
        """The seconds of a step with so many microbatches, one node after another."""
        return microbatches * sum(cost.total for cost in self.nodes) + sum(self.once)

    @property
    def stored_bytes(self) -> float:
        """Bytes of stored values on a slot."""
        return sum(self.stored)


def mesh_on(cluster: Cluster, axes: Mapping[str, int]) -> Mesh:
    """The mesh with these axes on the first slots of a cluster. Raises PlanError."""
    needed = math.prod(axes.values())
    if needed > len(cluster.devices):
        raise PlanError(
            f"a mesh of {' × '.join(f'{axis} {size}' for axis, size in axes.items())} needs "
            f"{needed} slots, but the cluster has {len(cluster.devices)}"
        )
    return Mesh.of(axes, cluster.devices[:needed])


def price_splits(
    view: IRGraph,
    axes: Mapping[str, int],
    splits: Sequence[Choices],
    *,
    cluster: Cluster,
    costs: Costs,
    training: bool,
    microbatches: int = 1,
    reasons: Sequence[str] | None = None,
) -> ChosenSplits:
    """What these splits take on the first slots of a cluster.

    ``axes`` are those of a mesh without a pipeline, ``splits`` have an entry an axis for each node
    of the view. Raises PlanError where a node cannot be split so, or the cluster is too small.
    """
    outline = outline_of(view)
    found = place(
        outline,
        splits,
        mesh=mesh_on(cluster, axes),
        cluster=cluster,
        training=training,
        microbatches=microbatches,
    )
    nodes, once = _seconds(found, costs)
    stored = [0.0] * len(view.nodes)
    for load in found.loads:
        stored[load.position] += load.nbytes
    said = list(reasons) if reasons is not None else plain_reasons(outline)
    return ChosenSplits(list(splits), nodes, once, stored, said)


def _seconds(found: PlacedGraph, costs: Costs) -> tuple[list[NodeCost], list[float]]:
    """Seconds of a microbatch, and once a step, for each node."""
    view = found.outline.view
    known: dict[tuple[int, Part], NodeCost] = {}
    spent = {phase: [0.0] * len(view.nodes) for phase in ("forward", "backward", "once")}
    for move in found.moves:
        spent[move.phase][move.position] += move.step.seconds
    nodes = []
    for i, (node, chosen) in enumerate(zip(view.nodes, found.strategies, strict=True)):
        key = (found.outline.kinds[i], chosen.part)
        if key not in known:
            known[key] = costs.node(view, node, chosen.part)
        forward, backward, weight = known[key]
        if not found.training:
            backward = weight = 0.0
        nodes.append(
            NodeCost(forward + spent["forward"][i], backward + spent["backward"][i], weight)
        )
    return nodes, spent["once"]


def plain_reasons(outline: Outline) -> list[str]:
    """Of nodes that cannot be split, why; nothing of the others."""
    return [
        (why_whole(outline.view, node) or "") if outline.bound(i) is None else ""
        for i, node in enumerate(outline.view.nodes)
    ]
