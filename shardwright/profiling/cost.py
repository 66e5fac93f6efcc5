"""What a node costs: seconds of its forward, and of its backward.

`Costs` is what planners ask; `Analytic` answers it from shapes alone, by the roofline of a device.
What always holds: no cost is negative, a view costs nothing, and more parts never cost more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from shardwright.ir import IRGraph, IRNode
from shardwright.layout import DeviceModel
from shardwright.profiling.gradients import needing_gradients, trained_parameters
from shardwright.profiling.roofline import node_work, seconds


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

    def node(self, graph: IRGraph, node: IRNode, parts: int = 1) -> NodeCost:
        """The seconds of one of ``parts`` equal parts that a node's work is dealt in."""


@dataclass(slots=True)
class Analytic(Costs):
    """Costs from shapes and a device's roofline.

    The backward is that of a training step: all parameters of a graph without markers are trained.
    """

    device: DeviceModel
    _known: tuple[IRGraph, int, set[int]] | None = field(default=None, compare=False, repr=False)
    """The graph that was asked for last, how many nodes it had, and what needs gradients in it."""

    def node(self, graph: IRGraph, node: IRNode, parts: int = 1) -> NodeCost:
        """The seconds of one of ``parts`` equal parts that a node's work is dealt in."""
        work = node_work(graph, node, self._needing(graph))
        return NodeCost(*(seconds(self.device, piece, parts) for piece in work))

    def _needing(self, graph: IRGraph) -> set[int]:
        known = self._known
        if known is None or known[0] is not graph or known[1] != len(graph.nodes):
            found = needing_gradients(graph, trained_parameters(graph))
            self._known = known = (graph, len(graph.nodes), found)
        return known[2]
