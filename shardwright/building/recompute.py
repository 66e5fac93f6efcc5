"""Recomputation: less of the forward is kept for the backward, and done again there.

In the backward the nodes of a block that are done again stand before the first that reads what they
make. The same operators are called on the same tensors, so that every number keeps its bits
(dropout too, whose mask follows from counters).

    none   all that the backward reads is kept
    full   only the inputs of each repeated layer are kept, or of the stage where nothing repeats
    auto   as much is kept as a slot has memory for, what is cheapest to do again being given up
           first: one price a byte on each slot, the lowest at which it fits, and of what that
           gives up as few layers as will do

A stage on a slot is looked at in blocks, the repeated layers of its forward. Always kept is what
crosses from one block to another or into the stage, what came by communication (nothing is sent
twice), and what would come out differently: what depends on a constant that each microbatch
replaces. What is computed again in a block is so computed from the block's inputs, whatever is done
in other blocks.

What a slot has memory for is counted as the planner does: a worker that waits begins the forward
behind the backward that it waits with, so that the tensors of one more microbatch are there
(`schedules.held`). Under a zero-bubble schedule weight gradients come later than the backward that
does nodes again; what they read of these is held until then, and does not count in ``memory``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardwright.building.slots import (
    Border,
    Item,
    LocalCommunication,
    Localized,
    PhaseStage,
    SlotGraph,
    makes,
    reads,
)
from shardwright.costs.placed import view_bases
from shardwright.errors import PlanError
from shardwright.ir import IRGraph, IRNode
from shardwright.planning.pipeline import node_work
from shardwright.planning.plan import TrainingPlan
from shardwright.schedules import make_schedule
from shardwright.schedules.run import HeldMicrobatches, held_at_once, waits_inside

LOWEST, HIGHEST = -1, 30
"""Prices that are tried are 2 to the power of numbers up to the highest; at the lowest all is kept.
A byte costs more to do again than its price only in products of a billion terms."""


def recompute(localized: Localized, training: TrainingPlan) -> Localized:
    """The slots with as much done again in the backward as the plan says.

    Raises PlanError where a slot's activations do not fit in the plan's memory in any way.
    """
    if training.recompute == "none":
        return localized
    stages = list(stages_of(localized))
    if training.recompute == "full":
        chosen = {block: demand(block, ()) for stage in stages for block in stage.blocks}
    else:
        chosen = _Budget(training, stages).choose()
    slots = {
        device: _rewritten(slot, [stage for stage in stages if stage.device == device], chosen)
        for device, slot in localized.slots.items()
    }
    return replace(localized, slots=slots)


def saved_bytes(localized: Localized) -> dict[tuple[str, int], int]:
    """The bytes that each stage on each slot keeps of a microbatch, from forward to backward."""
    return {
        (stage.device, stage.stage): stage.kept_bytes(
            demand(block, block.needed) for block in stage.blocks
        )
        for stage in stages_of(localized)
    }


# --- what stages keep ---------------------------------------------------------------------------


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
        for value_id in makes(slot.device, item)
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
        for value_id in reads(slot.device, item):
            if value_id in home:
                home[value_id].needed[value_id] = None
                if isinstance(item, LocalCommunication) or place.stage != number:
                    home[value_id].fixed.add(value_id)
            elif value_id not in made and place.stage == number:
                outside.add(value_id)
        made.update(makes(slot.device, item))
    graph, brought = slot.builder.graph, _brought(slot, PhaseStage("forward", number))
    return StageForward(slot.device, number, graph, blocks, outside, bases, brought)


def _brought(slot: SlotGraph, place: PhaseStage) -> int:
    """Bytes that communication inside a stage brings a slot; messages come from other stages."""
    return sum(
        slot.value(value_id).nbytes
        for item, where in zip(slot.items, slot.places, strict=True)
        if where == place and isinstance(item, LocalCommunication) and item.kind != "send"
        for value_id in makes(slot.device, item)
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


# --- minimum cut --------------------------------------------------------------------------------
#
# Keeping a value costs its bytes times a price, doing a node again costs its work. A value is there
# for the backward where it is kept or its node done again; a node can be done again where what it
# reads is there. The cheapest choice in which all is there that the backward reads is a minimum cut
# of a network: each value and each node stands on the side of the sink where it is there, or done
# again.
#
#     source -> node     the node's work: it is done again
#     node -> value      the value's bytes, at their price: it is kept
#     value -> node      no cut: what a node reads is there if the node is done again
#     value -> sink      no cut: what the backward reads is there


SOURCE, SINK = "source", "sink"


def kept_at(graph: IRGraph, block: LayerActivations, price: float) -> frozenset[int]:
    """The values of a block to keep if each byte costs ``price`` floating-point operations.

    What the block keeps in any case is not among them.
    """
    import networkx

    network = networkx.DiGraph()
    network.add_nodes_from((SOURCE, SINK))
    variable = {v for node in block.nodes for v in node.outputs} - block.fixed
    for node in block.nodes:
        network.add_edge(SOURCE, ("node", node.id), capacity=node_work(graph, node))
        for value_id in variable.intersection(node.outputs):
            cost = round(price * graph.values[value_id].nbytes)
            network.add_edge(("node", node.id), ("value", value_id), capacity=cost)
        for value_id in variable.intersection(node.inputs):
            network.add_edge(("value", value_id), ("node", node.id))
    for value_id in variable.intersection(block.needed):
        network.add_edge(("value", value_id), SINK)
    _, (_, there) = networkx.minimum_cut(network, SOURCE, SINK)
    return frozenset(_kept(block, variable, there))


def _kept(
    block: LayerActivations, variable: Collection[int], there: Collection[object]
) -> set[int]:
    """Values that are there though their node is not done again."""
    return {
        value_id
        for node in block.nodes
        for value_id in node.outputs
        if value_id in variable and ("value", value_id) in there and ("node", node.id) not in there
    }


# --- within a budget ------------------------------------------------------------------------------


class _Budget:
    """Chooses what to keep so that each slot's activations fit in its memory."""

    def __init__(self, training: TrainingPlan, stages: Sequence[StageForward]) -> None:
        assert training.memory is not None
        self._memory = training.memory
        self._stages = stages
        self._schedule = make_schedule(
            training.schedule,
            ranks=len(training.slots),
            microbatches=training.microbatches,
            chunks=training.chunks,
        )
        self._solved: dict[tuple[Hashable, int], frozenset[int]] = {}
        """What equal blocks keep at a price: positions among what they make."""
        self._kinds = {
            block: _kind(stage.graph, block) for stage in stages for block in stage.blocks
        }

    def choose(self) -> dict[LayerActivations, Demand]:
        """What each block keeps and does again."""
        chosen: dict[LayerActivations, Demand] = {}
        for device in dict.fromkeys(stage.device for stage in self._stages):
            chosen |= self._choose([stage for stage in self._stages if stage.device == device])
        return chosen

    def _choose(self, stages: Sequence[StageForward]) -> dict[LayerActivations, Demand]:
        """The same for the stages of one slot."""
        graphs = [(stage.graph, block) for stage in stages for block in stage.blocks]

        def at(exponent: int, count: int = len(graphs)) -> dict[LayerActivations, Demand]:
            """The first blocks at this price, the others at the one below."""
            return {
                block: self._demand(graph, block, exponent if i < count else exponent - 1)
                for i, (graph, block) in enumerate(graphs)
            }

        held = self._held(stages, at(LOWEST))

        def peak(exponent: int, count: int = len(graphs)) -> float:
            return self._peak(stages, at(exponent, count), held)

        def fits(exponent: int, count: int = len(graphs)) -> bool:
            return peak(exponent, count) <= self._memory

        if fits(LOWEST):
            return at(LOWEST)
        if not fits(HIGHEST):
            raise PlanError(
                f"the activations of slot {stages[0].device!r} take "
                f"{peak(HIGHEST):.0f} bytes even if all that can be is computed "
                f"again, but memory is {self._memory}; give more memory, fewer or smaller "
                "microbatches, or more slots"
            )
        exponent = _first(range(LOWEST + 1, HIGHEST), fits)
        count = _first(range(1, len(graphs)), lambda count: fits(exponent, count))
        return at(exponent, count)

    def _demand(self, graph: IRGraph, block: LayerActivations, exponent: int) -> Demand:
        """What a block keeps at a price; equal blocks are solved once."""
        made = [value_id for node in block.nodes for value_id in node.outputs]
        key = (self._kinds[block], exponent)
        if exponent == LOWEST:
            return demand(block, block.needed)
        if key not in self._solved:
            kept = kept_at(graph, block, 2.0**exponent)
            self._solved[key] = frozenset(i for i, value_id in enumerate(made) if value_id in kept)
        return demand(block, {made[i] for i in self._solved[key]})

    def _held(
        self, stages: Sequence[StageForward], everything: Mapping[LayerActivations, Demand]
    ) -> HeldMicrobatches:
        """How many microbatches a slot holds at once."""
        schedule, rank = self._schedule, self._schedule.placement[stages[0].stage]
        kept = sum(_kept_bytes(stage, everything) for stage in stages)
        waits = waits_inside(sum(stage.brought for stage in stages), kept)
        waiting = held_at_once(schedule, rank, inside=True) if waits else None
        return HeldMicrobatches(held_at_once(schedule, rank), waiting)

    def _peak(
        self,
        stages: Sequence[StageForward],
        chosen: Mapping[LayerActivations, Demand],
        held: HeldMicrobatches,
    ) -> float:
        """The most bytes of activations that a slot holds at once."""
        sizes = {stage.stage: _kept_bytes(stage, chosen) for stage in stages}
        rank = self._schedule.placement[stages[0].stage]
        return held.most([sizes.get(stage, 0) for stage in self._schedule.stages_of(rank)])


def _kept_bytes(stage: StageForward, chosen: Mapping[LayerActivations, Demand]) -> int:
    """What a stage keeps of a microbatch."""
    return stage.kept_bytes(chosen[block] for block in stage.blocks)


def _first(numbers: range, holds: Callable[[int], bool]) -> int:
    """The first number for which something holds, as it does for all after it; else the end."""
    low, high = numbers.start, numbers.stop
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low


def _kind(graph: IRGraph, block: LayerActivations) -> Hashable:
    """Equal for blocks that do the same, and of whose values the same are needed and fixed."""
    position: dict[int, int] = {}
    found: list[Hashable] = []
    for node in block.nodes:
        reads = tuple(position.get(v) for v in node.inputs)
        for value_id in node.outputs:
            position[value_id] = len(position)
        made = tuple(
            (graph.values[v].shape, graph.values[v].dtype, v in block.needed, v in block.fixed)
            for v in node.outputs
        )
        shapes = tuple(graph.values[v].shape for v in node.inputs)
        found.append((node.op, reads, shapes, made))
    return tuple(found)


# --- doing nodes again ----------------------------------------------------------------------------


@dataclass(slots=True)
class _Again:
    """Nodes of a block to be done again before the first backward node that reads of them."""

    nodes: Sequence[IRNode]
    copies: dict[int, int] = field(default_factory=dict)
    """Value to the value that is made again."""


def _rewritten(
    slot: SlotGraph, stages: Sequence[StageForward], chosen: Mapping[LayerActivations, Demand]
) -> SlotGraph:
    """A slot whose backward does nodes again and reads what they make."""
    waiting: dict[tuple[PhaseStage, int], _Again] = {}
    for stage in stages:
        for block in stage.blocks:
            again = _Again(chosen[block].again)
            made = (v for node in again.nodes for v in node.outputs)
            gone = (v for v in made if v not in chosen[block].kept)
            waiting |= dict.fromkeys(
                ((PhaseStage("backward", stage.stage), v) for v in gone), again
            )
    items: list[Item] = []
    places: list[PhaseStage] = []
    for item, place in zip(slot.items, slot.places, strict=True):
        if isinstance(item, IRNode):
            found = {v: waiting[place, v] for v in item.inputs if (place, v) in waiting}
            for again in found.values():
                items += _do(slot, again)
            if found:
                item = replace(
                    item, inputs=[found[v].copies[v] if v in found else v for v in item.inputs]
                )
        items.append(item)
        places += [place] * (len(items) - len(places))
    return replace(slot, items=items, places=places, noted=len(slot.builder.graph.nodes))


def _do(slot: SlotGraph, again: _Again) -> list[IRNode]:
    """The nodes once more, unless they stand there already."""
    if again.copies:
        return []
    graph = slot.builder.graph
    before = len(graph.nodes)
    for node in again.nodes:
        for value_id in node.inputs:
            again.copies.setdefault(value_id, value_id)
        slot.builder.copy_node(graph, node, again.copies)
    return graph.nodes[before:]
