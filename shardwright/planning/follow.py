"""Splitting a whole graph along one mesh axis, by following where splits lead.

Given where to begin, `follow` walks the nodes in order and keeps, for each value, whether it is
whole, a shard of one dimension, or a partial sum along the axis. A node that reads a shard goes on
with it where its dimension annotation lets it and where that costs less than gathering; a node that
can begin a split (a seed) does so. Nothing here knows a module's name or an operator's: what can be
done is what annotations say.

Everything that is reached from one beginning without communication is a region, and must be cut
at the same places: a region of ten heads, whose linear layers have 640 columns, is cut at multiples
of 64 there. The lengths of all identifiers in a region have a greatest common divisor; that many
units are dealt out over the axis, so there must be at least one a slot.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from shardwright.dimops.bound import BoundDimop, Flow
from shardwright.dimops.catalog import dimop_of
from shardwright.ir import IRGraph, IRNode, IRValue
from shardwright.ir.repeats import fingerprint
from shardwright.planning.plan import Split


class Sharded(NamedTuple):
    """A value of which each slot has a range of ``dim``."""

    dim: int
    region: int


PARTIAL = "partial"
State = Sharded | str | None
"""How a value lies along the axis; None where every slot has all of it."""


class Choice(NamedTuple):
    """An identifier to split a node by, and what it costs in bytes moved."""

    identifier: str
    bytes: int


Seed = Callable[["Following", IRNode, BoundDimop], str | None]
"""Names the identifier by which a node begins a split, None where it does not."""


@dataclass(slots=True)
class Following:
    """The states of all values so far, and the splits chosen."""

    graph: IRGraph
    size: int
    states: dict[int, State] = field(default_factory=dict)
    chosen: dict[int, tuple[str, int]] = field(default_factory=dict)
    """By node id: the identifier and its region."""
    lengths: dict[int, int] = field(default_factory=dict)
    """Units of each region that others have not been merged into."""
    merged: dict[int, int] = field(default_factory=dict)
    bounds: dict[object, BoundDimop | None] = field(default_factory=dict)

    # --- what is known ------------------------------------------------------------------------

    def bound(self, node: IRNode) -> BoundDimop | None:
        """The node's annotation for its shapes, looked up once for equal nodes."""
        key = fingerprint(self.graph, node)
        if key not in self.bounds:
            self.bounds[key] = dimop_of(self.graph, node)
        return self.bounds[key]

    def state(self, value_id: int) -> State:
        """How a value lies along the axis."""
        return self.states.get(value_id)

    def value(self, value_id: int) -> IRValue:
        """A value of the graph."""
        return self.graph.values[value_id]

    def region(self, region: int) -> int:
        """The region that a region was merged into."""
        while region in self.merged:
            region = self.merged[region]
        return region

    # --- what a split would do ----------------------------------------------------------------

    def units(self, node: IRNode, bound: BoundDimop, identifier: str) -> int:
        """How many units the region would have that a split of a node joins."""
        units = bound.length(identifier)
        for region in self._joined(node, bound.flow(identifier)):
            units = math.gcd(units, self.lengths[region])
        return units

    def fits(self, node: IRNode, bound: BoundDimop, identifier: str) -> bool:
        """Whether a node can be split by an identifier with at least a unit for each slot."""
        return identifier in bound.identifiers and self.units(node, bound, identifier) >= self.size

    def _joined(self, node: IRNode, flow: Flow) -> Iterator[int]:
        """The regions whose shards a split takes as they are."""
        for value_id, carry in zip(node.inputs, flow.inputs, strict=True):
            state = self.state(value_id)
            if isinstance(state, Sharded) and carry.kind == "shard" and carry.dim == state.dim:
                yield self.region(state.region)

    def cost(self, node: IRNode, flow: Flow | None) -> int:
        """Bytes that must move for a split, or for none."""
        total = 0
        for i, value_id in enumerate(node.inputs):
            state, nbytes = self.state(value_id), self.value(value_id).nbytes
            carry = flow.inputs[i] if flow is not None else None
            if isinstance(state, Sharded):
                stays = carry is not None and carry.kind == "shard" and carry.dim == state.dim
                free = carry is not None and carry.kind == "any"
                total += 0 if stays or free else nbytes
            elif state == PARTIAL:
                scattered = carry is not None and carry.kind == "shard"
                total += nbytes if scattered else 2 * nbytes
        if flow is not None:
            for value_id, carry in zip(node.outputs, flow.outputs, strict=True):
                total += 2 * self.value(value_id).nbytes if carry.kind == "partial" else 0
        return total

    def onward(self, node: IRNode, bound: BoundDimop) -> Choice | None:
        """The cheapest identifier along which the node can go on with a shard that it reads."""
        found = []
        for i, value_id in enumerate(node.inputs):
            state = self.state(value_id)
            if isinstance(state, Sharded):
                identifier = identifier_at(bound, i, state.dim)
                if identifier is not None and self.fits(node, bound, identifier):
                    found.append(Choice(identifier, self.cost(node, bound.flow(identifier))))
        return min(found, key=lambda choice: choice.bytes, default=None)

    # --- doing it -----------------------------------------------------------------------------

    def split(self, node: IRNode, bound: BoundDimop, identifier: str) -> None:
        """Split a node, and merge the regions that it joins."""
        flow = bound.flow(identifier)
        units = self.units(node, bound, identifier)
        region = len(self.lengths) + len(self.merged)
        for joined in set(self._joined(node, flow)):
            del self.lengths[joined]
            self.merged[joined] = region
        self.lengths[region] = units
        self.chosen[node.id] = (identifier, region)
        for value_id, carry in zip(node.outputs, flow.outputs, strict=True):
            if carry.kind == "shard" and carry.dim is not None:
                self.states[value_id] = Sharded(carry.dim, region)
            elif carry.kind == "partial":
                self.states[value_id] = PARTIAL

    def splits(self) -> list[Split | None]:
        """The split of each node in order, in units of its region."""
        return [self._split_of(node) for node in self.graph.nodes]

    def _split_of(self, node: IRNode) -> Split | None:
        if node.id not in self.chosen:
            return None
        identifier, region = self.chosen[node.id]
        bound = self.bound(node)
        assert bound is not None
        return Split(identifier, bound.length(identifier) // self.lengths[self.region(region)])


def follow(graph: IRGraph, size: int, seed: Seed, eager: Seed | None = None) -> Following:
    """Splits of a graph along an axis of ``size`` slots.

    ``seed`` begins splits at nodes that read no shard, or none that they can go on with; ``eager``
    goes before everything else.
    """
    following = Following(graph, size)
    for node in graph.nodes:
        bound = following.bound(node)
        if bound is not None:
            identifier = _choose(following, node, bound, seed, eager)
            if identifier is not None:
                following.split(node, bound, identifier)
    return following


def _choose(
    following: Following, node: IRNode, bound: BoundDimop, seed: Seed, eager: Seed | None
) -> str | None:
    if eager is not None and (identifier := eager(following, node, bound)) is not None:
        return identifier
    choice = following.onward(node, bound)
    if choice is not None and choice.bytes <= following.cost(node, None):
        return choice.identifier
    return seed(following, node, bound)


def identifier_at(bound: BoundDimop, idx: int, dim: int) -> str | None:
    """The identifier by which dimension ``dim`` of input ``idx`` can be split, None where none."""
    for identifier in bound.identifiers:
        carry = bound.flow(identifier).inputs[idx]
        if carry.kind == "shard" and carry.dim == dim:
            return identifier
    return None
