"""What each stage keeps of its forward until its backward.

A stage on a slot is looked at in blocks, the repeated layers of its forward. What its backward
reads of values that nodes made is either kept from the forward, or computed again from what is
kept. Always kept is what crosses from one block to another or into the stage, what came by
communication (nothing is sent twice), and what would come out differently: what depends on a
constant that each microbatch replaces. What is computed again in a block is so computed from the
block's inputs, whatever is done in other blocks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shardwright.building.live import given_by
from shardwright.building.slots import Border, LocalCommunication, Localized, PhaseStage, SlotGraph
from shardwright.costs.saved import view_bases
from shardwright.ir import IRGraph, IRNode


@dataclass(slots=True, eq=False)
class LayerActivations:
    """A layer of a stage: its nodes in order, and what must be there of what they make.

    ``fixed`` are values that are kept if anything needs them, ``needed`` those that the stage's
    backward reads.
    """

    nodes: list[IRNode] = field(default_factory=list)
    fixed: set[int] = field(default_factory=set)
    needed: dict[int, None] = field(default_factory=dict)

    def makers(self) -> dict[int, IRNode]:
        """The nodes by what they make."""
        return {value_id: node for node in self.nodes for value_id in node.outputs}


@dataclass(slots=True)
class StageForward:
    """A stage's forward on one slot.

    ``outside`` is what its backward reads that its nodes do not make; ``bases`` has, for each view
    in the slot's graph, the value that it is a view of in the end. ``brought`` are the bytes that
    slots of the stage bring each other in its forward, as they come to this one.
    """

    device: str
    stage: int
    graph: IRGraph
    blocks: list[LayerActivations]
    outside: set[int]
    bases: Mapping[int, int]
    brought: int

    def kept_bytes(self, demands: Iterable[Demand]) -> int:
        """The bytes that a stage keeps of a microbatch, stored values left out.

        Views of one tensor count once.
        """
        kept = self.outside.union(*(found.kept for found in demands))
        values = (self.graph.values[v] for v in {self.bases.get(v, v) for v in kept})
        return sum(value.nbytes for value in values if not value.is_stored)


@dataclass(frozen=True, slots=True)
class Demand:
    """What a block keeps, from outside it too, and the nodes that are done again, in order."""

    kept: frozenset[int]
    again: tuple[IRNode, ...]


def stages_of(localized: Localized) -> Iterator[StageForward]:
    """The stages of all slots whose backward reads anything."""
    for slot in localized.slots.values():
        stages = {p.stage for p in slot.places if p.phase == "forward" and p.stage is not None}
        bases = view_bases(slot.builder.graph)
        renewed = _renewed(localized, slot)
        for stage in sorted(stages):
            yield _stage(slot, stage, renewed, bases)


def _renewed(localized: Localized, slot: SlotGraph) -> set[int]:
    """The stored values of a slot that its forward replaces."""
    made = {
        value_id
        for item, place in zip(slot.items, slot.places, strict=True)
        if place.phase == "forward" and not isinstance(item, Border)
        for value_id in _made(slot.device, item)
    }
    updates = [(old, new) for old, new in localized.updates if old.device == slot.device]
    return {old.value for old, new in updates if new.value in made}


def _stage(
    slot: SlotGraph, number: int, renewed: set[int], bases: Mapping[int, int]
) -> StageForward:
    blocks = _blocks(slot, PhaseStage("forward", number))
    home = {v: block for block in blocks for node in block.nodes for v in node.outputs}
    for block in blocks:
        for node in block.nodes:
            if not renewed.isdisjoint(node.inputs):
                block.fixed.update(node.outputs)
            for value_id in node.inputs:
                if home.get(value_id, block) is not block:
                    home[value_id].fixed.add(value_id)
    outside: set[int] = set()
    made: set[int] = set()
    for item, place in zip(slot.items, slot.places, strict=True):
        if place.phase != "backward" or isinstance(item, Border):
            continue
        for value_id in _read(slot.device, item):
            if value_id in home:
                home[value_id].needed[value_id] = None
                if isinstance(item, LocalCommunication) or place.stage != number:
                    home[value_id].fixed.add(value_id)
            elif value_id not in made and place.stage == number:
                outside.add(value_id)
        made.update(_made(slot.device, item))
    graph, brought = slot.builder.graph, _brought(slot, PhaseStage("forward", number))
    return StageForward(slot.device, number, graph, blocks, outside, bases, brought)


def _brought(slot: SlotGraph, place: PhaseStage) -> int:
    """Bytes that communication inside a stage brings a slot; messages come from other stages."""
    return sum(
        slot.value(value_id).nbytes
        for item, where in zip(slot.items, slot.places, strict=True)
        if where == place and isinstance(item, LocalCommunication) and item.kind != "send"
        for value_id in _made(slot.device, item)
    )


def _blocks(slot: SlotGraph, place: PhaseStage) -> list[LayerActivations]:
    """The nodes of a place, cut at its borders."""
    blocks = [LayerActivations()]
    for item, where in zip(slot.items, slot.places, strict=True):
        if where == place and isinstance(item, IRNode):
            blocks[-1].nodes.append(item)
        elif where == place and isinstance(item, Border):
            blocks.append(LayerActivations())
    return [block for block in blocks if block.nodes]


def _read(device: str, item: IRNode | LocalCommunication) -> Sequence[int]:
    return item.inputs if isinstance(item, IRNode) else given_by(device, item)


def _made(device: str, item: IRNode | LocalCommunication) -> Sequence[int]:
    if isinstance(item, IRNode):
        return item.outputs
    return [m.gets for m in item.members if m.device == device and m.gets is not None]


def demand(block: LayerActivations, kept: Collection[int]) -> Demand:
    """What a block keeps, and does again, if of its own values it keeps at most these."""
    makers = block.makers()
    found: set[int] = set()
    again: set[int] = set()
    pending = list(block.needed)
    while pending:
        value_id = pending.pop()
        if value_id not in makers or value_id in block.fixed or value_id in kept:
            found.add(value_id)
        elif makers[value_id].id not in again:
            again.add(makers[value_id].id)
            pending += makers[value_id].inputs
    return Demand(frozenset(found), tuple(node for node in block.nodes if node.id in again))
