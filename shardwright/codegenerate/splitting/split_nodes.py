"""Nodes of split stages, written so that autograd's gradients of what they read are right.

As `shardwright.building.localize`, with a collective wherever a slot's own backward would make less
than the gradient that `split_holdings` promises:

    a whole that parts read       each slot makes the part that goes through its own work:
                                  `copy_to_parts` adds them up, once a value for all parts
    a term that the first adds    all slots read it, the others as zeros: `term_of_first`; so all
                                  have its gradient, which is the sum's, and nothing is sent
    what all parts make alike     one slot goes on with its gradient: `gradient_to_first`
    a maximum of parts' maxima    made of the whole by every slot: equal elements share its gradient
                                  evenly, wherever they are
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.building.holdings import PlacedValue
from shardwright.building.localize import LocalNode, NodeWriter, SplitNode
from shardwright.clusters import Mesh
from shardwright.codegenerate.splitting.split_holdings import StageHoldings
from shardwright.ir import IRNode, IRValue
from shardwright.ops.catalog import dimop_of
from shardwright.planning.plan import Assignment
from shardwright.sharding import Partial, Replicate
from shardwright.sharding.strategy import NodeAxis


@dataclass
class StageWriter(NodeWriter):
    """Writes nodes and the collectives that their gradients need."""

    holdings: StageHoldings

    def add(self, node: IRNode, assignment: Assignment) -> LocalNode:
        """Write a node on the slots of its mesh. Raises PlanError."""
        written = super().add(node, assignment)
        for index, value_id in enumerate(node.outputs):
            self._give_to_first(written, index, value_id)
        return written

    def _settled(self, node: IRNode, assignment: Assignment) -> Assignment:
        """The assignment without the axes along which a gradient would go through a maximum."""
        assignment = super()._settled(node, assignment)
        if self.holdings.differentiable.isdisjoint(node.outputs):
            return assignment
        bound = dimop_of(self.graph, node)
        splits = tuple(
            None if bound is not None and _compares(NodeAxis.of(bound, split), node) else split
            for split in assignment.splits
        )
        return Assignment(assignment.mesh, splits)

    def operands(
        self, node: IRNode, split: SplitNode, sources: Sequence[PlacedValue | None]
    ) -> dict[str, list[IRValue | None]]:
        """What the part on each slot reads."""
        ready = [
            None if source is None else self._ready(node.inputs[index], source, split.axes, index)
            for index, source in enumerate(sources)
        ]
        return {
            device: [
                None if source is None else self.slots[device].value(source.local[device])
                for source in ready
            ]
            for device in split.parts
        }

    def _ready(
        self, value_id: int, source: PlacedValue, axes: Sequence[NodeAxis], index: int
    ) -> PlacedValue:
        """An input as parts read it."""
        value = self.graph.values[value_id]
        if value_id in self.holdings.differentiable:
            shared = [a for a in _axes(source.mesh) if _is_shared(axes[a], index)]
            source = self.holdings.for_parts(value, source, shared)
        for axis in _axes(source.mesh):
            if axes[axis].adds(index):
                source = self.holdings.along("term_of_first", value, source, axis)
        return source

    def _give_to_first(self, written: LocalNode, index: int, value_id: int) -> None:
        """Let one slot go on with the gradient of an output that all made alike."""
        if value_id not in self.holdings.differentiable:
            return
        held, value = self.holdings.held[value_id], self.graph.values[value_id]
        for axis in _axes(written.mesh):
            if written.axes[axis].repeats(index):
                held[-1] = self.holdings.along("gradient_to_first", value, held[-1], axis)


def _compares(axis: NodeAxis, node: IRNode) -> bool:
    """Whether slots along an axis make terms that are not added, as a maximum's."""
    made = (axis.output(index) for index in range(len(node.outputs)))
    return any(isinstance(placement, Partial) and placement != Partial() for placement in made)


def _axes(mesh: Mesh) -> list[int]:
    """The axes of more than one slot."""
    return [axis for axis, size in enumerate(mesh.sizes) if size > 1]


def _is_shared(axis: NodeAxis, index: int) -> bool:
    """Whether parts along an axis read all of an input, so that each has a part of its gradient."""
    return (
        axis.split is not None
        and not axis.adds(index)
        and axis.input(index) == Replicate()
        and axis.gradient(index) == Partial()
    )
