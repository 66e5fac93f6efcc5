"""What the nodes of a forward cost on a slot under splits that are given.

Comes in: a forward, the mesh of a stage, and what it splits of each node. Goes out: `Priced`,
seconds of each node, with the communication that brings it what it reads, and the mirror of that in
the backward; and seconds once a step, in which gradients of stored values are put together.

A value is converted once for each layout that nodes read it in, from the cheapest that is there; a
gradient once for each layout that nodes make it in. Equal questions are answered once, and so are
equal layers: what was found out of a block is taken for every block that is wired alike, split
alike, and given values that lie alike.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from shardwright.clusters import Cluster, DeviceModel, Mesh
from shardwright.costs.cost import Costs
from shardwright.costs.operations import ADD_PASSES
from shardwright.ir.tensor_meta import torch_dtype
from shardwright.planning.plan import Terms
from shardwright.planning.prediction.segments import Place, Segment
from shardwright.planning.prediction.source import Floats, Forward, Splits
from shardwright.planning.prediction.spread import Alike, compute_costs
from shardwright.planning.prediction.sums import added
from shardwright.sharding import Layout, Partial, Replicate, Shard, convert
from shardwright.sharding.strategy import NodeAxis, wanted


@dataclass(frozen=True, slots=True)
class Priced:
    """Seconds of each node for a microbatch, and once a step.

    nodes
        A row for each node: forward, backward, weight.
    gathered
        Of each node, how many communications put gradients of stored values together, once a step.
    fetched
        The values that communication brought: value, the node that reads it, its bytes.
    """

    nodes: Floats
    once: Floats
    gathered: Floats
    fetched: list[tuple[int, int, float]]


def price(
    source: Forward,
    mesh: Mesh,
    splits: Sequence[Splits],
    cluster: Cluster,
    costs: Costs,
    groups: Alike,
) -> Priced:
    """The cost of a forward's nodes on a slot of a mesh under these splits."""
    axes = dict(zip(mesh.axes, mesh.sizes, strict=True))
    nodes = compute_costs(source, splits, axes, costs, groups)
    if source.training:
        nodes[:, 1] += _additions(source, groups, cluster.device)
    if not mesh.devices[1:]:
        return Priced(nodes, np.zeros(len(nodes)), np.zeros(len(nodes)), [])
    pricing = _Pricing(source, mesh, cluster, splits, groups)
    pricing.run()
    nodes[:, :2] += pricing.moved[:, :2]
    return Priced(nodes, pricing.moved[:, 2], pricing.moved[:, 3], pricing.fetched)


def _additions(source: Forward, groups: Alike, device: DeviceModel) -> Floats:
    """Seconds in which gradients are added that come back to a node's outputs from several."""
    met = source.holds.met.pairs(groups.parts[groups.number])
    seconds = ADD_PASSES * met.size / device.bandwidth + device.overhead
    return added(met.node, seconds, len(source.view.nodes))


@dataclass(frozen=True, slots=True)
class _Tensors:
    """How a node's tensors lie: what it reads, what it makes, the gradients of what it reads."""

    inputs: tuple[Layout | None, ...]
    outputs: tuple[Layout, ...]
    gradients: tuple[Layout, ...]


class _State(NamedTuple):
    """How a value lies, and how the gradients of it lie that were made."""

    held: tuple[Layout, ...]
    given: tuple[Layout, ...]


class _Walked(NamedTuple):
    """What was found out of a segment: its seconds, what was fetched, how values lie behind it."""

    moved: Floats
    fetched: list[tuple[Place, int, float]]
    outside: list[_State]
    made: list[_State]


@dataclass(slots=True)
class _Pricing:
    source: Forward
    mesh: Mesh
    cluster: Cluster
    splits: Sequence[Splits]
    groups: Alike
    moved: Floats = field(init=False)
    """A row for each node: seconds of the forward, of the backward, once a step; and how many
    communications there are once a step."""
    tensors: dict[Hashable, _Tensors] = field(default_factory=dict)
    seconds: dict[Hashable, float] = field(default_factory=dict)
    held: dict[int, list[Layout]] = field(default_factory=dict)
    """The layouts in which a value is there, that in which it was made first."""
    fetched: list[tuple[int, int, float]] = field(default_factory=list)
    given: dict[int, list[Layout]] = field(default_factory=dict)
    """Layouts in which gradients of a value were made."""
    walked: dict[Hashable, _Walked] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.moved = np.zeros((len(self.splits), 4))

    def run(self) -> None:
        """Go through the nodes; through equal segments once."""
        for segment in self.source.segments:
            groups = self.groups.number[segment.start : segment.stop].tobytes()
            before = tuple(map(self._state, segment.outside))
            key = segment.wiring, groups, before
            if key in self.walked:
                self._repeat(segment, self.walked[key])
            else:
                self.walked[key] = self._walk(segment)

    def _state(self, value_id: int) -> _State:
        return _State(tuple(self.held.get(value_id, ())), tuple(self.given.get(value_id, ())))

    def _walk(self, segment: Segment) -> _Walked:
        """Node by node."""
        first, view = len(self.fetched), self.source.view
        for i in range(segment.start, segment.stop):
            self.moved[i] = self._node(i)
        return _Walked(
            self.moved[segment.start : segment.stop].copy(),
            [
                (segment.place(view, value_id), at - segment.start, nbytes)
                for value_id, at, nbytes in self.fetched[first:]
            ],
            [self._state(value_id) for value_id in segment.outside],
            [self._state(segment.value(view, place)) for place in segment.made],
        )

    def _repeat(self, segment: Segment, walked: _Walked) -> None:
        """As it was in an equal segment."""
        view = self.source.view
        self.moved[segment.start : segment.stop] = walked.moved
        self.fetched += [
            (segment.value(view, place), segment.start + offset, nbytes)
            for place, offset, nbytes in walked.fetched
        ]
        made = (segment.value(view, place) for place in segment.made)
        states = (*walked.outside, *walked.made)
        for value_id, state in zip((*segment.outside, *made), states, strict=True):
            if state.held:
                self.held[value_id] = list(state.held)
            self.given[value_id] = list(state.given)

    def _node(self, position: int) -> tuple[float, float, float, int]:
        """Of communication the row of a node."""
        node = self.source.view.nodes[position]
        lie = self._lie(position, self._settled(position, self.splits[position]))
        forward, backward, once, gathered = 0.0, 0.0, 0.0, 0
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
                    gathered += seconds > 0
                else:
                    backward += seconds
        self.held.update((v, [made]) for v, made in zip(node.outputs, lie.outputs, strict=True))
        return forward, backward, once, gathered

    def _settled(self, position: int, splits: Splits) -> Splits:
        """The splits, without terms of a sum along axes that have none to go on with."""
        inputs = self.source.view.nodes[position].inputs

        def in_terms(value_id: int, axis: int) -> bool:
            held = self.held.get(value_id, [])
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
        axes = [NodeAxis.of(bound, split) for split in splits]
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
        given = self.given.setdefault(value_id, [])
        if gradient in given:
            return 0.0
        given.append(gradient)
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
