"""What a node costs: seconds of its forward, and of its backward.

`Costs` is what planners ask; `Analytic` answers it from shapes alone, by the roofline of a device.
Invariant: no cost is negative, a view costs nothing, and a smaller part never costs more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from shardwright.autodiff.needed import needing_gradients, trained_parameters
from shardwright.clusters import DeviceModel
from shardwright.costs.roofline import Calls, node_calls, seconds
from shardwright.ir import IRGraph, IRNode
from shardwright.sharding.strategy import WHOLE, LargestPart


class NodeCost(NamedTuple):
    """Seconds of one call on one microbatch.

    forward
        The call itself.
    backward
        The gradients of what nodes made; 0 where none is needed.
    weight
        The gradients of stored values; 0 where none is needed.
    """

    forward: float
    backward: float
    weight: float

    @property
    def total(self) -> float:
        """All three."""
        return self.forward + self.backward + self.weight


class Costs(Protocol):
    """Says what nodes cost."""

    def node(self, graph: IRGraph, node: IRNode, part: LargestPart = WHOLE) -> NodeCost:
        """The seconds of a node, or of a part of it."""


@dataclass(frozen=True, slots=True)
class Analytic(Costs):
    """Costs from shapes and a device's roofline.

    The backward is that of a training step. ``trained`` are the parameters, by value id, that want
    gradients: by default those that a step's optimizer replaces, and all of a graph without one.
    """

    device: DeviceModel
    trained: frozenset[int] | None = None
    _memory: list[_Known] = field(default_factory=list, compare=False, repr=False)
    """What is known of the graph that was asked for last."""

    def node(self, graph: IRGraph, node: IRNode, part: LargestPart = WHOLE) -> NodeCost:
        """The seconds of a node, or of a part of it."""
        known = self._known(graph)
        key = node.id, part
        if key not in known.work:
            known.work[key] = node_calls(graph, node, known.needing, part)
        return NodeCost(
            *(sum(seconds(self.device, call) for call in calls) for calls in known.work[key])
        )

    def _known(self, graph: IRGraph) -> _Known:
        memory = self._memory
        if not memory or memory[0].graph is not graph or memory[0].nodes != len(graph.nodes):
            trained = trained_parameters(graph) if self.trained is None else self.trained
            needing = frozenset(needing_gradients(graph, trained))
            memory[:] = [_Known(graph, len(graph.nodes), needing)]
        return memory[0]


@dataclass(frozen=True, slots=True)
class _Known:
    """A graph when it had so many nodes: which values want gradients, and work by node and part."""

    graph: IRGraph
    nodes: int
    needing: frozenset[int]
    work: dict[tuple[int, LargestPart], Calls] = field(default_factory=dict)
