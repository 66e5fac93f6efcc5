"""Splitting a whole graph along one mesh axis, by following where splits lead.

Given where to begin, `follow` walks the nodes in order and keeps, for each value, whether it is
whole, a shard of one dimension, or a partial sum along the axis. A node that reads a shard goes on
with it where its dimension annotation lets it and where that costs less than gathering; a node that
can begin a split (a seed) does so. A partial sum stays one through nodes that are linear in it, and
is reduced, once, where something else reads it. What is computed from stored values alone (a
transposed weight) is split as its readers want it. Nothing here knows a module's name or an
operator's: what can be done is what annotations say.

Everything that is reached from one beginning without communication is a region, and must be cut
at the same places: a region of ten heads, whose linear layers have 640 columns, is cut at multiples
of 64 there. The lengths of all identifiers in a region have a greatest common divisor; that many
units are sharded over the axis, so there must be at least one a slot.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shardwright.ir import IRGraph, IRNode, IRValue
from shardwright.ops.bound import BoundDimop, Flow
from shardwright.ops.independence import Annotations, identifier_at
from shardwright.planning.plan import Split, Terms


class Sharded(NamedTuple):
    """A value of which each slot has a range of ``dim``."""

    dim: int
    region: int


State = Sharded | str | None
"""How a value lies along the axis: a partial result is named by its reduction (``sum``, ``max``,
``min``); None where every slot has all of it."""


class SplitChoice(NamedTuple):
    """An identifier to split a node by, and what it costs in bytes moved."""

    identifier: str
    bytes: int


Seed = Callable[["SplitPropagation", IRNode, BoundDimop], str | None]
"""Names the identifier by which a node begins a split, None where it does not."""


@dataclass(slots=True)
class SplitPropagation:
    """The states of all values so far, and what was chosen for nodes."""

    graph: IRGraph
    size: int
    annotations: Annotations
    stored_bytes: int = field(init=False)
    """Of all stored values that are read."""
    states: dict[int, State] = field(default_factory=dict)
    chosen: dict[int, tuple[str, int]] = field(default_factory=dict)
    """By node id: the identifier and its region."""
    terms: dict[int, Terms] = field(default_factory=dict)
    """By node id: what is done on terms of a sum."""
    gathered: set[int] = field(default_factory=set)
    """Shards of which every slot has got the whole, too."""
    weights: set[int] = field(default_factory=set)
    """Values that are computed from stored values alone."""
    lengths: dict[int, int] = field(default_factory=dict)
    """Units of each region that others have not been merged into."""
    merged: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.stored_bytes = sum(value.nbytes for value in self.graph.stored() if value.users)

    # --- what is known ------------------------------------------------------------------------

    def bound(self, node: IRNode) -> BoundDimop | None:
        """The node's annotation for its shapes."""
        return self.annotations.of(node)

    @property
    def nodes(self) -> dict[int, IRNode]:
        """Of the graph, by id."""
        return self.annotations.nodes

    def state(self, value_id: int) -> State:
        """How a value lies along the axis."""
        return self.states.get(value_id)

    def value(self, value_id: int) -> IRValue:
        """A value of the graph."""
        return self.graph.values[value_id]

    def is_weight(self, value_id: int) -> bool:
        """Whether a value is stored, or computed from nothing but stored values."""
        return value_id in self.weights or self.value(value_id).is_stored

    def region(self, region: int) -> int:
        """The region that a region was merged into."""
        last = region
        while last in self.merged:
            last = self.merged[last]
        while region != last:  # the next time it is one step
            self.merged[region], region = last, self.merged[region]
        return last

    # --- what a split would do ----------------------------------------------------------------

    def units(self, node: IRNode, bound: BoundDimop, identifier: str) -> int:
        """How many units the region would have that a split of a node joins."""
        units = bound.length(identifier)
        for region in self._joined(node, bound.flow(identifier)):
            units = math.gcd(units, self.lengths[region])
        return units

    def fits(self, node: IRNode, bound: BoundDimop, identifier: str) -> bool:
        """Whether a node can be split by an identifier with at least a unit for each slot."""
        if identifier not in bound.identifiers:
            return False
        return self.units(node, bound, identifier) >= self.size

    def _joined(self, node: IRNode, flow: Flow) -> Iterator[int]:
        """The regions whose shards a split takes as they are."""
        for value_id, carry in zip(node.inputs, flow.inputs, strict=True):
            state = self.states.get(value_id)
            if state is None:
                continue
            if isinstance(state, Sharded) and carry.kind == "shard" and carry.dim == state.dim:
                yield self.region(state.region)

    def cost(self, node: IRNode, flow: Flow | None) -> int:
        """Bytes that must move for a split, or for none."""
        total = 0
        for i, value_id in enumerate(node.inputs):
            state = self.states.get(value_id)
            if state is None:
                continue
            nbytes = self.value(value_id).nbytes
            carry = flow.inputs[i] if flow is not None else None
            if isinstance(state, Sharded) and value_id not in self.gathered:
                stays = carry is not None and carry.kind == "shard" and carry.dim == state.dim
                free = carry is not None and carry.kind == "any"
                total += 0 if stays or free else nbytes
            elif isinstance(state, str):
                scattered = carry is not None and carry.kind == "shard"
                total += nbytes if scattered else 2 * nbytes
        if flow is not None:
            for value_id, carry in zip(node.outputs, flow.outputs, strict=True):
                if carry.kind == "partial":
                    total += 2 * self.value(value_id).nbytes
        return total

    def onward(self, node: IRNode, bound: BoundDimop) -> SplitChoice | None:
        """The cheapest identifier along which the node can go on with a shard that it reads."""
        found: dict[str, SplitChoice] = {}
        for i, value_id in enumerate(node.inputs):
            state = self.state(value_id)
            if isinstance(state, Sharded):
                identifier = identifier_at(bound, i, state.dim)
                if identifier is None or identifier in found:
                    continue
                if self.fits(node, bound, identifier):
                    cost = self.cost(node, bound.flow(identifier))
                    found[identifier] = SplitChoice(identifier, cost)
        return min(found.values(), key=lambda choice: choice.bytes, default=None)

    def linear(self, node: IRNode, bound: BoundDimop) -> Terms | None:
        """The partial sums that a node can be done on, term by term, to reduce no more behind it.

        Nothing else may read them, since they would then be reduced for that as well. What else
        the node reads is read whole.
        """
        for inputs in bound.linear if len(node.outputs) == 1 else ():
            rest = [self.state(v) for i, v in enumerate(node.inputs) if i not in inputs]
            sums = [node.inputs[i] for i in inputs]
            sharded = any(isinstance(state, Sharded) for state in rest)
            if all(map(self._is_lone_sum, sums)) and not sharded:
                read = sum(self.value(v).nbytes for v in sums)
                if self.value(node.outputs[0]).nbytes <= read:
                    return Terms(inputs)
        return None

    def _is_lone_sum(self, value_id: int) -> bool:
        alone = len(self.value(value_id).users) == 1 and value_id not in self.graph.outputs
        return alone and self.state(value_id) == "sum"

    def leads_on(self, node: IRNode, bound: BoundDimop, identifier: str) -> bool:
        """Whether what a split makes can be read as it is, as far as the way is certain.

        It is followed through nodes of one tensor (weights not counted) to where others come in.
        """
        units = bound.length(identifier)
        pending = _shards(node, bound.flow(identifier))
        while pending:
            value_id, dim = pending.pop()
            for reader in (self.nodes[user] for user in self.value(value_id).users):
                bound_there, at = self.bound(reader), reader.inputs.index(value_id)
                onward = None if bound_there is None else identifier_at(bound_there, at, dim)
                if bound_there is None or onward is None:
                    return False
                units = math.gcd(units, bound_there.length(onward))
                if units < self.size:
                    return False
                if sum(not self.is_weight(v) for v in reader.inputs) == 1:
                    pending += _shards(reader, bound_there.flow(onward))
        return True

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
        for value_id, carry in zip(node.inputs, flow.inputs, strict=True):
            if carry.kind == "shard" and carry.dim is not None:
                self._read_shard(value_id, Sharded(carry.dim, region))
            elif carry.kind != "any":
                self._read_whole(value_id)
        for value_id, carry in zip(node.outputs, flow.outputs, strict=True):
            if carry.kind == "shard" and carry.dim is not None:
                self.states[value_id] = Sharded(carry.dim, region)
            elif carry.kind == "partial":
                self.states[value_id] = bound.reduction

    def keep_terms(self, node: IRNode, terms: Terms) -> None:
        """Do a node on the terms of partial sums; what it makes are partial sums."""
        self.terms[node.id] = terms
        for i, value_id in enumerate(node.inputs):
            if i not in terms.inputs:
                self._read_whole(value_id)
        self.states |= dict.fromkeys(node.outputs, "sum")

    def keep_whole(self, node: IRNode) -> None:
        """Do all of a node on every slot."""
        for value_id in node.inputs:
            self._read_whole(value_id)
        if node.inputs and all(map(self.is_weight, node.inputs)):
            self.weights |= set(node.outputs)

    def _read_whole(self, value_id: int) -> None:
        if isinstance(self.state(value_id), str):
            self.states[value_id] = None
        elif self.state(value_id) is not None:
            self.gathered.add(value_id)

    def _read_shard(self, value_id: int, wanted: Sharded) -> None:
        """A sum is reduced to shards, a weight computed in shards."""
        state = self.state(value_id)
        if isinstance(state, str):
            self.states[value_id] = wanted
        elif state is None and value_id in self.weights:
            self._pull(value_id, wanted)

    def _pull(self, value_id: int, wanted: Sharded) -> None:
        """Split what computes a weight, back to what is stored, where that has enough units."""
        pending = [(value_id, wanted.dim)]
        while pending:
            value_id, dim = pending.pop()
            producer = self.value(value_id).producer
            if producer is None or producer in self.chosen:
                continue
            node = self.nodes[producer]
            bound = self.bound(node)
            identifier = None if bound is None else identifier_made_at(bound, dim)
            if bound is None or identifier is None:
                continue
            units = math.gcd(self.lengths[wanted.region], bound.length(identifier))
            if units >= self.size:
                flow = bound.flow(identifier)
                self.lengths[wanted.region] = units
                self.chosen[node.id] = (identifier, wanted.region)
                self.states[value_id] = Sharded(dim, wanted.region)
                pending += [
                    (source, carry.dim)
                    for source, carry in zip(node.inputs, flow.inputs, strict=True)
                    if carry.kind == "shard" and carry.dim is not None
                ]

    def makes_shards(self, node: IRNode) -> bool:
        """Whether a node is split so that what it makes is, too."""
        return node.id in self.chosen and isinstance(self.state(node.outputs[0]), Sharded)

    def whole_bytes(self) -> int:
        """Bytes of stored values that some node reads whole."""
        whole: set[int] = set()
        for node in self.graph.nodes:
            flow = None
            if node.id in self.chosen:
                bound = self.bound(node)
                assert bound is not None
                flow = bound.flow(self.chosen[node.id][0])
            for i, value_id in enumerate(node.inputs):
                if flow is None or flow.inputs[i].kind != "shard":
                    whole.add(value_id)
        return sum(value.nbytes for value in self.graph.stored() if value.id in whole)

    def splits(self) -> list[Split | Terms | None]:
        """What is done with each node in order; splits are in units of their regions."""
        return [self._split_of(node) for node in self.graph.nodes]

    def _split_of(self, node: IRNode) -> Split | Terms | None:
        if node.id not in self.chosen:
            return self.terms.get(node.id)
        identifier, region = self.chosen[node.id]
        bound = self.bound(node)
        assert bound is not None
        return Split(identifier, bound.length(identifier) // self.lengths[self.region(region)])


def follow(
    graph: IRGraph,
    size: int,
    *,
    eager: Sequence[Seed] = (),
    seeds: Sequence[Seed] = (),
    scatters: Sequence[Seed] = (),
    annotations: Annotations | None = None,
) -> SplitPropagation:
    """What an axis of ``size`` slots does with each node.

    ``eager`` seeds go before everything else. Then a node goes on with a shard that it reads, else
    ``seeds`` may begin a split there, else it goes on with terms of a sum that it reads, else
    ``scatters`` may, else it is done whole. ``annotations`` are the graph's, where they are known.
    """
    following = SplitPropagation(graph, size, annotations or Annotations(graph))
    for node in graph.nodes:
        bound = following.bound(node)
        if bound is None or (node.inputs and all(map(following.is_weight, node.inputs))):
            following.keep_whole(node)
            continue
        identifier = _first(eager, following, node, bound) or _onward(following, node, bound)
        identifier = identifier or _first(seeds, following, node, bound)
        terms = following.linear(node, bound) if identifier is None else None
        if terms is not None:
            following.keep_terms(node, terms)
            continue
        identifier = identifier or _first(scatters, following, node, bound)
        if identifier is not None:
            following.split(node, bound, identifier)
        else:
            following.keep_whole(node)
    return following


def _first(
    seeds: Sequence[Seed], following: SplitPropagation, node: IRNode, bound: BoundDimop
) -> str | None:
    """What the first seed that begins a split at a node says."""
    found = (seed(following, node, bound) for seed in seeds)
    return next((identifier for identifier in found if identifier is not None), None)


def _onward(following: SplitPropagation, node: IRNode, bound: BoundDimop) -> str | None:
    """The identifier to go on with, where that moves no more bytes than gathering."""
    choice = following.onward(node, bound)
    if choice is None or choice.bytes > following.cost(node, None):
        return None
    return choice.identifier


def _shards(node: IRNode, flow: Flow) -> list[tuple[int, int]]:
    """The outputs of a split node that are shards, and their dimension."""
    return [
        (value_id, carry.dim)
        for value_id, carry in zip(node.outputs, flow.outputs, strict=True)
        if carry.kind == "shard" and carry.dim is not None
    ]


def identifier_made_at(bound: BoundDimop, dim: int) -> str | None:
    """The identifier that splits a node of one output by dimension ``dim`` of it."""
    for identifier in bound.identifiers:
        made = bound.flow(identifier).outputs
        if len(made) == 1 and (made[0].kind, made[0].dim) == ("shard", dim):
            return identifier
    return None
