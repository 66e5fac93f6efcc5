"""What the nodes of a forward cost on a slot under splits that are given.

Comes in: a forward, the mesh of a stage, and what it splits of each node. Goes out: `Priced`,
seconds of each node, with the communication that brings it what it reads, and the mirror of that in
the backward; and seconds once a step, in which gradients of stored values are put together.

A value is converted once for each layout that nodes read it in, from the cheapest that is there; a
gradient once for each layout that nodes make it in. Equal questions are answered once.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from shardwright.ir.dtypes import torch_dtype
from shardwright.layout import Cluster, Layout, Mesh, Partial, Replicate, Shard, convert
from shardwright.planning.plan import Terms
from shardwright.planning.prediction.spread import Forward, Splits, compute_costs
from shardwright.planning.splitting.axes import Axis, wanted
from shardwright.profiling.cost import Costs, NodeCost


@dataclass(frozen=True, slots=True)
class Priced:
    """Seconds of each node for a microbatch, and once a step.

    ``fetched`` are the values that communication brought: value, the node that reads it, its bytes.
    """

    nodes: list[NodeCost]
    once: list[float]
    fetched: list[tuple[int, int, float]]


def price(
    source: Forward,
    mesh: Mesh,
    splits: Sequence[Splits],
    cluster: Cluster,
    costs: Costs,
) -> Priced:
    """The cost of a forward's nodes on a slot of a mesh under these splits."""
    axes = dict(zip(mesh.axes, mesh.sizes, strict=True))
    nodes = compute_costs(source, splits, axes, costs)
    once = [0.0] * len(nodes)
    pricing = _Pricing(source, mesh, cluster)
    if mesh.devices[1:]:
        for i, found in enumerate(splits):
            moved = pricing.node(i, found)
            cost = nodes[i]
            nodes[i] = NodeCost(
                cost.forward + moved.forward, cost.backward + moved.backward, cost.weight
            )
            once[i] = moved.weight
    return Priced(nodes, once, pricing.fetched)


@dataclass(frozen=True, slots=True)
class _Tensors:
    """How a node's tensors lie: what it reads, what it makes, the gradients of what it reads."""

    inputs: tuple[Layout | None, ...]
    outputs: tuple[Layout, ...]
    gradients: tuple[Layout, ...]


@dataclass(slots=True)
class _Pricing:
    source: Forward
    mesh: Mesh
    cluster: Cluster
    tensors: dict[Hashable, _Tensors] = field(default_factory=dict)
    seconds: dict[Hashable, float] = field(default_factory=dict)
    held: dict[int, list[Layout]] = field(default_factory=dict)
    """The layouts in which a value is there, that in which it was made first."""
    fetched: list[tuple[int, int, float]] = field(default_factory=list)
    given: set[tuple[int, Layout]] = field(default_factory=set)
    """Values and layouts in which gradients of them were made."""

    def node(self, position: int, splits: Splits) -> NodeCost:
        """Seconds of communication: of the forward, the backward, and once a step."""
        node = self.source.view.nodes[position]
        lie = self._lie(position, self._settled(position, splits))
        forward = backward = once = 0.0
        for index, value_id in enumerate(node.inputs):
            layout = lie.inputs[index]
            if layout is None:
                continue
            seconds = self._fetch(value_id, layout)
            if seconds:
                self.fetched.append((value_id, position, self._bytes(value_id, layout)))
            forward += seconds
            if value_id in self.source.needing and self.source.training:
                seconds = self._answer(value_id, lie.gradients[index])
                if value_id in self.source.trained:
                    once += seconds
                else:
                    backward += seconds
        self.held.update((v, [made]) for v, made in zip(node.outputs, lie.outputs, strict=True))
        return NodeCost(forward, backward, once)

    def _settled(self, position: int, splits: Splits) -> Splits:
        """The splits, without terms of a sum along axes that have none to go on with."""
        inputs = self.source.view.nodes[position].inputs

        def in_terms(value_id: int, axis: int) -> bool:
            held = self.held.get(value_id, ())
            return bool(held) and all(found.placements[axis] == Partial() for found in held)

        return tuple(
            None
            if isinstance(split, Terms) and not all(in_terms(inputs[i], axis) for i in split.inputs)
            else split
            for axis, split in enumerate(splits)
        )

    def _lie(self, position: int, splits: Splits) -> _Tensors:
        key = self.source.kinds[position], splits
        if key not in self.tensors:
            self.tensors[key] = self._work_out(position, splits)
        return self.tensors[key]

    def _work_out(self, position: int, splits: Splits) -> _Tensors:
        node = self.source.view.nodes[position]
        whole = Layout.replicated(self.mesh)
        if not any(splits):
            inputs, outputs = len(node.inputs), len(node.outputs)
            return _Tensors((whole,) * inputs, (whole,) * outputs, (whole,) * inputs)
        bound = self.source.bound(position)
        assert bound is not None
        axes = [Axis.of(bound, split) for split in splits]
        values = self.source.view.values
        return _Tensors(
            tuple(
                found and found.normal(self.mesh, values[v].shape)
                for v, found in ((v, wanted(axes, i)) for i, v in enumerate(node.inputs))
            ),
            tuple(
                Layout(tuple(axis.output(i) for axis in axes)).normal(self.mesh, values[v].shape)
                for i, v in enumerate(node.outputs)
            ),
            tuple(
                Layout(tuple(axis.gradient(i) for axis in axes)).normal(self.mesh, values[v].shape)
                for i, v in enumerate(node.inputs)
            ),
        )

    def _fetch(self, value_id: int, layout: Layout) -> float:
        """Seconds until a value is there in a layout; what is stored is loaded in any."""
        value = self.source.view.values[value_id]
        held = self.held.setdefault(value_id, [layout])
        if layout in held or (value.producer is None):
            return 0.0
        found = min(self._convert(value_id, source, layout) for source in held)
        held.append(layout)
        return found

    def _bytes(self, value_id: int, layout: Layout) -> float:
        """What a slot holds of a value in a layout."""
        pairs = zip(layout.placements, self.mesh.sizes, strict=True)
        parts = math.prod(size for found, size in pairs if isinstance(found, Shard))
        return self.source.view.values[value_id].nbytes / parts

    def _answer(self, value_id: int, gradient: Layout) -> float:
        """Seconds until a gradient made in a layout lies as the value was made."""
        if (value_id, gradient) in self.given:
            return 0.0
        self.given.add((value_id, gradient))
        return self._convert(value_id, gradient, _mirror(self.held[value_id][0]))

    def _convert(self, value_id: int, source: Layout, target: Layout) -> float:
        value = self.source.view.values[value_id]
        key = source, target, value.shape, value.dtype
        if source == target:
            return 0.0
        if key not in self.seconds:
            itemsize = torch_dtype(value.dtype).itemsize
            self.seconds[key] = convert(
                source,
                target,
                mesh=self.mesh,
                shape=value.shape,
                itemsize=itemsize,
                cluster=self.cluster,
            ).seconds
        return self.seconds[key]


def _mirror(layout: Layout) -> Layout:
    """How the gradient of a value lies that lies so."""
    return Layout(tuple(Replicate() if isinstance(p, Partial) else p for p in layout.placements))
